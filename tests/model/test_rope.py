"""Rotary embeddings that look at the length, one sequence at a time."""

import torch
from support.models import super_model, tiny_model

from tlora.model.rope import SequenceRope


def test_kinds_by_layer_type_are_asked_for_theirs() -> None:
    """Gemma 3 names the layer type as a third argument, by place; one of its types is dynamic."""
    types = ["sliding_attention", "full_attention"]
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    plain = {"rope_type": "default", "rope_theta": 1e4}
    model = super_model(
        tiny_model("gemma3_text", rope_parameters=dict(zip(types, (plain, dynamic), strict=True)))
    )
    ropes = [module for module in model.model.modules() if isinstance(module, SequenceRope)]
    assert len(ropes) == 1
    positions = torch.arange(9)[None]
    model.routing._lengths = [9]
    cos = {kind: ropes[0](torch.zeros(1, 9, 8), positions, kind)[0] for kind in types}
    assert cos["full_attention"].shape == cos["sliding_attention"].shape
