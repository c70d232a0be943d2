"""Holding a model's linears in fewer bits, as it is loaded."""

from collections.abc import Iterable

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from tlora.core.errors import ModelError, SpecError
from tlora.core.job import BaseSpec
from tlora.kernels.quantised import quantise, quantised_bytes
from tlora.kernels.quantised.proving import prove
from tlora.kernels.quantised.weights import Format
from tlora.model.quantised_linear import QuantisedLinear
from tlora.model.targets import Target, find_targets


def check_quantisable(base: BaseSpec, targets: dict[str, Target]) -> None:
    if base.quantization != "none" and not any(_can_be(target) for target in targets.values()):
        raise SpecError(
            f"{base.model} has no linear whose weight can be held in {base.quantization}; leave "
            "quantization out",
            field="base.quantization",
        )


@torch.no_grad()
def quantise_linears(model: PreTrainedModel, how: Format, device: torch.device) -> None:
    """Every linear that can carry an adapter, which leaves embeddings, head, norms and experts. One
    after the other is brought to the device and let go, so that there is no second model
    anywhere."""
    targets = [target for target in find_targets(model).values() if _can_be(target)]
    if not targets:
        raise ModelError(
            f"base.model: {type(model).__name__} has no linear whose weight can be held in {how}"
        )
    prove(device, how)
    for target in targets:
        linear = model.get_submodule(target.path)
        assert isinstance(linear, nn.Linear)
        if not linear.weight.isfinite().all():
            raise ModelError(f"base.model: the weight of {target.path} holds what is no number")
        kept = quantise(linear.weight.to(device), how)
        model.set_submodule(target.path, QuantisedLinear(kept, linear))


def restore_linears(model: PreTrainedModel, paths: Iterable[str]) -> None:
    """In full, with the values they were quantised to: linears that carry no adapter are called by
    the model's own code, and have to be differentiated and compiled like any other."""
    for path in paths:
        linear = model.get_submodule(path)
        if isinstance(linear, QuantisedLinear):
            model.set_submodule(path, linear.in_full())


def saved_bytes(targets: Iterable[Target], how: Format, itemsize: int) -> int:
    """What the weights of a model take less than in full, at so many bytes a value."""
    sizes = [(each.out_features, each.in_features) for each in targets if _can_be(each)]
    return sum(out * into * itemsize - quantised_bytes(out, into, how) for out, into in sizes)


def _can_be(target: Target) -> bool:
    return not target.transposed
