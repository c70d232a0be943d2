"""Decoder layers that keep their input only and run again in backward.

What is small and dear to make is kept all the same: S = drop(X) A^T of every group of linears.

Layers as they were written are left to torch, which stops the second run as soon as backward has
what it needs. It cannot stop within a graph, nor may the second run save other tensors than the
first did. So a compiled layer is two graphs: a forward without gradients that gives every S, and a
forward with gradients that takes them, whose backward follows at once. The second one's outputs
are hollow, so that the compiler leaves out whatever only they need: the last product above all.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers.modeling_utils import PreTrainedModel

from tlora.model.compiling import Compile, layers_of, varies
from tlora.model.linear import LoraLinear
from tlora.model.routing import Routing


def recompute_layers(model: PreTrainedModel, routing: Routing) -> None:
    """Of layers that are not compiled."""
    model.gradient_checkpointing_enable(
        {"use_reentrant": False, "context_fn": lambda: (routing.running_again(), nullcontext())}
    )
    for layer in layers_of(model):
        # Layers recompute only in training mode; their children stay in evaluation mode, so that
        # the backbone's own dropout stays off.
        layer.training = True


class RecomputedLayer:
    """The forward of a compiled layer."""

    def __init__(self, routing: Routing, layer: nn.Module, compiled: Compile) -> None:
        self.routing = routing
        self.layer = layer
        linears = [each for each in layer.modules() if isinstance(each, LoraLinear)]
        self.groups = [linear.group for linear in linears if linear.index == 0]
        self.first: Callable[..., tuple[Any, list[torch.Tensor | None]]] = compiled(self._first)
        self.again: Callable[..., tuple[torch.Tensor | None, ...]] = compiled(self._again)

    def __call__(self, *arguments: object, **keywords: object) -> object:
        leaves, shape = tree_flatten((arguments, keywords))
        if not torch.is_grad_enabled():
            return self.first(*arguments, **keywords)[0]
        # Something that requires a gradient: the first layer's input need not.
        anchor = self.groups[0].pool.a.operand if self.groups else None
        return Recompute.apply(self, shape, anchor, *leaves)

    def _first(self, *arguments: object, **keywords: object):
        """What the layer gives, and S of every group if it will run again."""
        outputs = self._forward(*arguments, **keywords)
        return outputs, [group.take() for group in self.groups]

    def _again(self, kept: list[torch.Tensor | None], *arguments: object, **keywords: object):
        """A graph for backward alone."""
        for group, s in zip(self.groups, kept, strict=True):
            group.give(s)
        outputs = self._forward(*arguments, **keywords)
        return Hollow.apply(*(outputs if isinstance(outputs, tuple) else (outputs,)))

    def _forward(self, *arguments: object, **keywords: object):
        # Not the layer's own attribute, which this object is.
        return type(self.layer).forward(self.layer, *arguments, **keywords)


class Recompute(torch.autograd.Function):
    """Runs a layer without gradients and saves its inputs and S; with them in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: RecomputedLayer,
        shape: TreeSpec,
        anchor: torch.Tensor | None,
        *leaves: object,
    ):
        # Detached: the same graph for the first layer, whose input requires no gradient.
        arguments, keywords = tree_unflatten(list(map(_detached, leaves)), shape)
        with layer.routing.running_again():
            outputs, kept = layer.first(*arguments, **keywords)
        tensors = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        ctx.save_for_backward(*tensors, *kept)
        ctx.others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        ctx.layer, ctx.shape = layer, shape
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None):
        n, layer = len(ctx.others), cast(RecomputedLayer, ctx.layer)
        tensors, kept = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
        needed = ctx.needs_input_grad[3:]
        leaves = [
            other if tensor is None else tensor.detach().requires_grad_(needs)
            for tensor, other, needs in zip(tensors, ctx.others, needed, strict=True)
        ]
        arguments, keywords = tree_unflatten(leaves, ctx.shape)
        for s in kept:
            if s is not None:
                # Some backends mark what their graphs give; not all do.
                varies(s, 1)
        with torch.enable_grad():
            outputs = layer.again(list(kept), *arguments, **keywords)
        pairs = zip(outputs, gradients, strict=True)
        used = [(y, dy) for y, dy in pairs if y is not None and dy is not None]
        torch.autograd.backward([y for y, _ in used], [dy for _, dy in used])
        found = [leaf.grad if needs else None for leaf, needs in zip(leaves, needed, strict=True)]
        return None, None, None, *found


class Hollow(torch.autograd.Function):
    """Tensors for which gradients are asked, and values are not."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor | None):
        # From shapes alone: no graph must take them for made of the outputs.
        return tuple(
            None if y is None else torch.empty(y.shape, dtype=y.dtype, device=y.device)
            for y in outputs
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None):
        return gradients


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
