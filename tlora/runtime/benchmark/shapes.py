"""Base models to measure on: named shapes with random weights, the demo's base, a local model.

A shape is looked at without its weights first, so that one that cannot fit is refused before
anything is allocated.
"""

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_utils import PreTrainedModel

from tlora.core.assets import DEMO
from tlora.core.errors import SpecError
from tlora.core.job import BaseSpec
from tlora.model.loading import context_length, launch_on, load_base, load_shape
from tlora.model.memory import activation_bytes
from tlora.model.quantising import quantise_linears
from tlora.model.targets import Target, find_targets
from tlora.runtime.benchmark.machine import free_bytes

LLAMA = {
    "vocab_size": 128_256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}
RANDOM_SHAPES = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "llama-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}

BYTES_PER_POOL_VALUE = 16
"""A float32 adapter weight, its gradient and two moments."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is known of a base before its weights are there."""

    name: str
    dtype: torch.dtype
    parameters: int
    matmul_parameters: int
    """Of the linears and the head: what a token is multiplied with. Embeddings are looked up."""

    vocabulary: int
    positions: int | None
    targets: list[Target]

    def needed_bytes(self, *, budget_tokens: int, total_rank: int) -> int:
        """Weights, adapters and the activations of one nano-batch, roughly."""
        widths = sum(target.in_features + target.out_features for target in self.targets)
        per_token = activation_bytes(widths, self.vocabulary, self.dtype.itemsize)
        return round(
            self.parameters * self.dtype.itemsize
            + widths * total_rank * BYTES_PER_POOL_VALUE
            + per_token * budget_tokens
        )


def look_at(name: str, dtype: str, device: torch.device) -> Shape:
    """The shape, without allocating it."""
    if name in RANDOM_SHAPES:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(_config(name))
        chosen = torch.bfloat16 if device.type == "cuda" else torch.float32
    else:
        model = load_shape(_base_spec(name, dtype))
        chosen = model.dtype
    if dtype != "auto":
        chosen = getattr(torch, dtype)
    targets = list(find_targets(model).values())
    embeddings = model.get_input_embeddings().weight
    assert isinstance(embeddings, torch.Tensor)
    head = model.get_output_embeddings()
    assert head is not None
    linears = sum(target.in_features * target.out_features for target in targets)
    return Shape(
        name=name,
        dtype=chosen,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        matmul_parameters=linears + sum(p.numel() for p in head.parameters()),
        vocabulary=embeddings.shape[0],
        positions=context_length(model.config),
        targets=targets,
    )


def check_fits(
    shape: Shape, device: torch.device, *, budget_tokens: int, total_rank: int, free: int | None
) -> None:
    """Before anything is allocated. `free` is None where the system does not say."""
    needed = shape.needed_bytes(budget_tokens=budget_tokens, total_rank=total_rank)
    if free is not None and needed > free:
        raise SpecError(
            f"{shape.name} in {str(shape.dtype).removeprefix('torch.')} needs about "
            f"{needed / 2**30:.1f} GiB with nano-batches of {budget_tokens} tokens, and "
            f"{free / 2**30:.1f} GiB are free on {device}; take a smaller shape, --dtype bfloat16 "
            "or a smaller --budget",
            field="--shape",
        )


def check_room(shape: Shape, device: torch.device, *, budget_tokens: int, total_rank: int) -> None:
    """`check_fits` on this machine as it is now."""
    check_fits(
        shape,
        device,
        budget_tokens=budget_tokens,
        total_rank=total_rank,
        free=free_bytes(device),
    )


def load(shape: Shape, device: torch.device) -> PreTrainedModel:
    """With weights: random ones in the named shapes, always the same, never zeros."""
    if shape.name not in RANDOM_SHAPES:
        dtype = str(shape.dtype).removeprefix("torch.")
        return load_base(_base_spec(shape.name, dtype), device).eval()
    launch_on(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(_config(shape.name), dtype=shape.dtype)
    return model.to(device).eval()


def twin(model: PreTrainedModel, *, quantization: str = "none") -> PreTrainedModel:
    """Another model over the same weights: arms change modules and attention, not weights. Its
    linears may be held in fewer bits, of their own then."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    found = copy.deepcopy(model, shared)
    if quantization != "none":
        quantise_linears(found, quantization, model.device)  # type: ignore[arg-type]
    return found


def _config(name: str) -> LlamaConfig:
    return LlamaConfig(**LLAMA, **RANDOM_SHAPES[name])


def _base_spec(name: str, dtype: str) -> BaseSpec:
    path = DEMO / "base" if name == "demo" else Path(name).expanduser()
    return BaseSpec(model=str(path), dtype=dtype)  # type: ignore[arg-type]
