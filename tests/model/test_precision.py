"""Checks in float32 of a model that trains in half precision."""

import numpy as np
import pytest
import torch
from support.tiny import tiny_llama

from tlora.core.job import DataSpec, JobSpec, LoraSpec, TrainSpec
from tlora.core.sequence import TokenSequence
from tlora.model import linear
from tlora.model.super_model import SuperModel
from tlora.runtime import exporting


def test_an_adapter_is_checked_by_its_own_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels read a copy in half precision the logits are still those of the matrices, which
    are what is written; afterwards kernels have their copies back."""
    monkeypatch.setattr(linear, "operand_dtype", lambda *_: torch.bfloat16)
    model = SuperModel(tiny_llama().bfloat16())
    job = JobSpec(name="a", data=DataSpec(path="none"), lora=LoraSpec(r=4), train=TrainSpec())
    weights = model.new_adapter(job)
    for pair in weights.values():
        pair.b.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    model.attach("a", weights, scale=job.lora.scale)
    copies = [rows.operand for pool in model.pools for rows in pool.matrices]
    ids = np.arange(1, 20)
    assert exporting.look(model, job, TokenSequence(ids, ids)).result() < 1e-5
    assert all(copy.dtype == torch.bfloat16 for copy in copies)
    assert [id(each) for each in copies] == [
        id(rows.operand) for pool in model.pools for rows in pool.matrices
    ]
