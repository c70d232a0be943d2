"""A model that computes in float32 whatever its weights are stored in, for checks that must be
sharp.

In bfloat16 the rounding of a forward hides an error of one per cent. Weights are widened, which
changes no value, one module at a time, so that there is never a second copy of the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tlora.model.compiling import uncompiled
from tlora.model.linear import LoraLinear

NARROW = (torch.bfloat16, torch.float16)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """While entered, the model's forward computes in float32 with the values its weights have.
    Nothing is compiled for that: hooks that change weights are no part of a graph."""
    hooks = []
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            # A row that is looked up is the same number in either format.
            hooks.append(module.register_forward_hook(_widen_output))
        elif isinstance(module, LoraLinear):
            if module.index == 0:
                hooks += _widen_while_running(module, _SharedWeights(module))
        elif any(_is_narrow(parameter) for parameter in module.parameters(recurse=False)):
            hooks += _widen_while_running(module, _OwnWeights(module))
    try:
        with uncompiled(model):
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _OwnWeights:
    """The parameters of a module itself."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kept: dict[str, nn.Parameter | None] = {}

    def widen(self) -> None:
        self.kept = dict(self.module._parameters)
        for name, parameter in self.kept.items():
            if parameter is not None and _is_narrow(parameter):
                wide = nn.Parameter(parameter.detach().float(), requires_grad=False)
                self.module._parameters[name] = wide

    def restore(self) -> None:
        self.module._parameters.update(self.kept)
        self.kept = {}


class _SharedWeights:
    """Those of linears that are computed together when the first of them is called. Their adapters
    are float32 in the pool; kernels may be given a copy that is not."""

    def __init__(self, linear: LoraLinear) -> None:
        self.group = linear.group
        self.kept = (self.group.weights, self.group.biases)
        self.operands = [rows.operand for rows in self.group.pool.matrices]

    def widen(self) -> None:
        self.group.weights = [_widened(weight) for weight in self.kept[0]]
        self.group.biases = [bias if bias is None else _widened(bias) for bias in self.kept[1]]
        for rows in self.group.pool.matrices:
            rows.operand = rows.value

    def restore(self) -> None:
        self.group.weights, self.group.biases = self.kept
        for rows, operand in zip(self.group.pool.matrices, self.operands, strict=True):
            rows.operand = operand


def _widen_while_running(module: nn.Module, weights: _OwnWeights | _SharedWeights) -> list:
    return [
        module.register_forward_pre_hook(lambda *_: weights.widen()),
        module.register_forward_hook(lambda *_: weights.restore(), always_call=True),
    ]


def _widen_output(module: nn.Module, inputs: tuple, output: Any) -> torch.Tensor:
    return _widened(output)


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.dtype in NARROW


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if _is_narrow(tensor) else tensor
