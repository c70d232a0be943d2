"""The modules that take the place of a model's linears."""

from typing import cast

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tlora.core.errors import ModelError
from tlora.kernels import row_tiles
from tlora.kernels.multi_lora import Ways, multi_lora
from tlora.kernels.multi_lora.proving import prove_kernels, proven_ways
from tlora.kernels.multi_lora.routes import inside_ways, operand_dtype
from tlora.kernels.quantised import dense, fp8
from tlora.model.compiling import in_shards
from tlora.model.pool import GroupPool
from tlora.model.quantised_linear import QuantisedLinear
from tlora.model.routing import Routing
from tlora.model.targets import Target

Linear = nn.Linear | Conv1D | QuantisedLinear


class SharedInput:
    """Linears that are called with the same tensor (q, k and v; gate and up), computed together.

    The first one called computes all; the others take their result. Which linears share an input,
    and in which order they are called, was seen in a forward pass of the model itself.
    """

    def __init__(
        self, linears: list[Linear], numbers: list[int], pool: GroupPool, routing: Routing
    ) -> None:
        self.numbers = torch.tensor(numbers)
        self.pool = pool
        self.routing = routing
        self.transposed = pool.targets[0].transposed
        self.dtype = activations_of(linears[0])
        """Of activations."""

        self.weights: list[torch.Tensor] = [_values(linear) for linear in linears]
        """As they are kept."""

        self.biases: list[torch.Tensor | None] = [linear.bias for linear in linears]
        quantised = [linear for linear in linears if isinstance(linear, QuantisedLinear)]
        self.scales = [linear.scales for linear in quantised] or None
        self.turned: torch.Tensor | None = None
        """Weights in FP8 once more: a GPU's product for dX reads them in this order only."""

        if self.in_fp8 and fp8.reads_turned(routing.device):
            self.turned = fp8.turned(self.weights)
        self.tile_rows = 0
        """Rows of a tile where whole products would not keep their bits (row_probe.py)."""

        self.keeps = True
        """Whether S is kept from forward to the recomputing of a layer in backward: it is small,
        and what makes it reads all of the input."""

        self._kept: torch.Tensor | None = None
        self._input: torch.Tensor | None = None
        self._ready: dict[int, torch.Tensor] = {}

    @property
    def in_fp8(self) -> bool:
        """Whether frozen products round activations to FP8, too."""
        like = torch.empty(0, dtype=self.dtype, device=self.routing.device)
        return self.scales is not None and fp8.multiplies(like, self.weights)

    def full_weights(self) -> list[torch.Tensor]:
        """[out, in], for products of activations; quantised ones made anew."""
        if self.scales is None:
            return [weight.T if self.transposed else weight for weight in self.weights]
        shapes = [(target.out_features, target.in_features) for target in self.pool.targets]
        kept = zip(self.weights, self.scales, shapes, strict=True)
        return [dense(*each, self.dtype) for each in kept]

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if index == 0:
            # In this order: recomputing ends by an exception in here, and must not hold on to x.
            self._ready = dict(enumerate(self._compute(x)))
            self._input = x
        assert x is self._input, "linears of one group were called with different inputs"
        y = self._ready.pop(index)
        if not self._ready:
            self._input = None
        return y

    def clear(self) -> None:
        """Drop what a failed forward may have left."""
        self._input = None
        self._ready = {}
        self._kept = None

    def give(self, s: torch.Tensor | None) -> None:
        """S of the next input, which is not computed again."""
        self._kept = s

    def take(self) -> torch.Tensor | None:
        """S of the last input, if it was kept."""
        kept, self._kept = self._kept, None
        return kept

    def _compute(self, x: torch.Tensor) -> list[torch.Tensor]:
        kept = self.take()
        keep = self.keeps and self.routing.runs_again
        outputs = multi_lora(
            x.reshape(-1, x.shape[-1]),
            self.weights,
            self.biases,
            a=self.pool.a.operand,
            b=[rows.operand for rows in self.pool.b],
            grad_a=self.pool.a.grad,
            grad_b=[rows.grad for rows in self.pool.b],
            route=self.routing.route(self.pool),
            rows=self.routing.rows,
            linears=self.numbers,
            transposed=self.transposed,
            tile_rows=self.tile_rows,
            kept=kept,
            keep=keep,
            scales=self.scales,
            turned=self.turned,
        )
        if keep:
            *outputs, self._kept = outputs
        return [y.view(*x.shape[:-1], -1) for y in outputs]


class LoraLinear(nn.Module):
    """One linear of a group; what is frozen stays where the model had it."""

    def __init__(self, linear: Linear, index: int, group: SharedInput) -> None:
        super().__init__()
        self._parameters.update(linear._parameters)
        self._buffers.update(linear._buffers)
        self.index = index
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.output(self.index, x)


class TiledLinear(nn.Module):
    """A linear without adapters, the output head say, computed in tiles of rows."""

    def __init__(self, linear: Linear, tile_rows: int) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.transposed = isinstance(linear, Conv1D)
        self.tile_rows = tile_rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.T if self.transposed else self.weight
        y = row_tiles.linear(x.reshape(-1, x.shape[-1]), weight, self.bias, self.tile_rows)
        return y.view(*x.shape[:-1], -1)


def replace_linears(
    model: PreTrainedModel,
    grouped: list[list[str]],
    targets: dict[str, Target],
    routing: Routing,
    *,
    reserve_rows: int,
) -> list[SharedInput]:
    """Put LoRA linears in the place of the model's; `grouped` are the paths of those that share an
    input (probe.py)."""
    numbers = {path: number for number, path in enumerate(targets)}
    # Where bits count: whether a block of tokens is too crowded for it depends on the neighbours.
    # In shards: a weight may begin anywhere in what was gathered, where nothing can be copied from.
    apart = routing.per_sequence or in_shards(model)
    _prove_kernels(model, grouped, targets, routing.device)
    groups = []
    for paths in grouped:
        linears = [cast(Linear, model.get_submodule(path)) for path in paths]
        own = [targets[path] for path in paths]
        operands = operand_dtype(routing.device, activations_of(linears[0]), len(paths))
        inside = () if apart else _inside(linears, own, routing.device, operands)
        pool = GroupPool(own, reserve_rows, routing.device, operands, inside)
        group = SharedInput(linears, [numbers[path] for path in paths], pool, routing)
        groups.append(group)
        for index, (path, linear) in enumerate(zip(paths, linears, strict=True)):
            model.set_submodule(path, LoraLinear(linear, index, group))
    _check_formats(model, [group.pool for group in groups])
    return groups


def _prove_kernels(
    model: PreTrainedModel,
    grouped: list[list[str]],
    targets: dict[str, Target],
    device: torch.device,
) -> None:
    """Before any pool relies on them."""
    if grouped:
        first = cast(Linear, model.get_submodule(grouped[0][0]))
        shapes = {_shape([targets[path] for path in paths]) for paths in grouped}
        prove_kernels(device, activations_of(first), shapes)


def activations_of(linear: Linear) -> torch.dtype:
    """What it is given, and gives."""
    return linear.dtype if isinstance(linear, QuantisedLinear) else linear.weight.dtype


def _values(linear: Linear) -> torch.Tensor:
    return linear.values if isinstance(linear, QuantisedLinear) else linear.weight


def _shape(targets: list[Target]) -> tuple[int, tuple[int, ...]]:
    return targets[0].in_features, tuple(target.out_features for target in targets)


def _check_formats(model: PreTrainedModel, pools: list[GroupPool]) -> None:
    """An optimiser's pass writes copies in one format."""
    formats = {pool.a.operand.dtype for pool in pools} - {torch.float32}
    if len(formats) > 1:
        names = " and ".join(sorted(str(each).removeprefix("torch.") for each in formats))
        raise ModelError(
            f"base.model: {type(model).__name__} has linears in {names}; load it in one of them "
            "with base.dtype"
        )


def _inside(
    linears: list[Linear], targets: list[Target], device: torch.device, operands: torch.dtype
) -> Ways:
    """Which products of these linears may take the adapters' update."""
    into, outs = shape = _shape(targets)
    if _values(linears[0]).dtype == fp8.FORMAT:
        # Products of FP8 come first, and the update is added to them.
        return ()
    ways = inside_ways(device, operands, into, outs)
    # Nothing adds a bias there.
    biased = any(linear.bias is not None for linear in linears)
    able: Ways = tuple(way for way in ways if way == "backward" or not biased)
    return proven_ways(device, operands, shape, able)
