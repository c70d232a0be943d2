"""A model in shards beside the whole one."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from support.jobs import VOCABULARY
from support.rank_jobs import spec_of
from tlora.core.job import BaseSpec
from tlora.core.plan import Plan
from tlora.core.sequence import TokenSequence
from tlora.model import compiling, super_model
from tlora.model.loading import load_base
from tlora.model.packing import Share, pack
from tlora.model.rank_rows import copy_all
from tlora.model.super_model import SuperModel
from tlora.parallel.counting import Counts
from tlora.parallel.lock_step import Pass
from tlora.parallel.mesh import shard_mesh
from tlora.parallel.shard_loading import load_sharded


def save_variant(kind: str, path: Any) -> None:
    """A tiny base of some kind."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2 if "compiled" in kind else 3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=kind == "tied",
        attention_bias=kind == "biased",
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config)
    if kind == "biased":
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    model.to(torch.bfloat16 if kind == "bfloat16" else torch.float32).save_pretrained(path)


@contextmanager
def traced_layers() -> Iterator[None]:
    """Layers are traced as for compiling, and run by torch's own kernels."""
    kept = super_model.compile_layers
    super_model.compile_layers = partial(compiling.compile_layers, backend="aot_eager")
    try:
        yield
    finally:
        super_model.compile_layers = kept


def same_in_shards(kind: str, path: str) -> dict[str, bool]:
    """A model in shards beside the whole one."""
    with traced_layers():
        (losses, gradients), (expected, own) = shards_beside_whole(kind, path, torch.device("cpu"))
    return {
        "losses": torch.equal(losses, expected),
        "gradients": all(map(torch.equal, gradients, own)),
        "refuses": not torch.equal(losses * (1 + 1e-6), expected) and any(map(torch.any, own)),
    }


def shards_beside_whole(
    kind: str, path: str, device: torch.device
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Losses and gradients of both, forward and backward, twice. One rank gathers from nobody, and
    goes through the rest."""
    counts, alone = Counts(), dist.get_world_size() == 1
    half = device.type == "cuda" and "compiled" in kind
    base = BaseSpec(model=path, dtype="bfloat16" if half else "auto")
    mesh = shard_mesh(Plan(bucket=64, fsdp=dist.get_world_size()), device)
    kept = {"kept": 3, "kept in part": 1, "kept, checkpointed": 2, "kept, compiled": 1}.get(kind, 0)
    loaded, sharded = load_sharded(base, device, mesh, counts=counts, kept_layers=kept)
    settings = {
        "gradient_checkpointing": "checkpointed" in kind,
        "compiled": "compiled" in kind,
    }
    with sharded.building():
        model = SuperModel(loaded, **settings)
        sharded.serve(model)
    whole = SuperModel(load_base(base, device), **settings)
    share = Share("odd", [TokenSequence(*2 * [np.arange(4, 30, dtype=np.int32)])], [0], [1.0], 7)
    batch = pack([share], 32, device)
    found: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for each in (model, whole):
        each.attach("odd", each.new_adapter(spec_of("odd")), scale=1.0, dropout=0.1)
        for rows in each.views("odd").values():
            generator = torch.Generator().manual_seed(3)
            rows.value.copy_(torch.randn(rows.value.shape, generator=generator))
        copy_all(each.rows("odd").copied)
        # Every kind of pass is traced by itself, which takes its time.
        for train in (True, True) if "compiled" in kind else (True, False, True):
            if each is model and not alone:
                sharded.begin(Pass.TRAIN if train else Pass.FORWARD)
            with torch.set_grad_enabled(train), each.routed(batch, train=train):
                losses = each.token_losses(batch)
                if train:
                    torch.autograd.backward(losses, torch.ones_like(losses))
            if each is model and not alone:
                sharded.end()
        gradients = [rows.grad.clone() for rows in each.views("odd").values()]
        found.append((losses.detach(), gradients))
    return found
