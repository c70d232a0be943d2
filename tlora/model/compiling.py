"""Decoder layers through `torch.compile`, whole graphs only.

All layers of a model share what is compiled: whatever differs between them (weights, pools, routes)
reaches the graph as a tensor. The number of tokens is fixed in the first graph and symbolic from
the second size on; rank rows and lists are symbolic from the start, so that jobs come and go
without compiling anything. Layers that run again in backward are two graphs (recomputing.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_layers import GradientCheckpointingLayer

MOST_GRAPHS = 64
"""Of one layer: training and evaluation, with and without a gradient of the input, two sizes, and
kinds of layers. torch stops at eight."""

Compile = Callable[[Callable], Callable]
"""What makes a function a compiled one."""


def layers_of(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def compile_layers(
    model: nn.Module,
    *,
    in_parts: Callable[[nn.Module, Compile], Callable] | None = None,
    dynamic: bool | None = None,
    backend: str | Callable = "inductor",
) -> int:
    """Layer by layer; how many there are. Nothing is compiled before it is run. `in_parts` gives a
    layer's forward where that is more than one graph."""
    layers = layers_of(model)
    if layers:
        import torch._dynamo.config as settings

        settings.recompile_limit = max(settings.recompile_limit, MOST_GRAPHS)
    compiled = partial(torch.compile, dynamic=dynamic, fullgraph=True, backend=backend)
    for layer in layers:
        if in_parts is not None:
            layer.forward = in_parts(layer, compiled)
        elif isinstance(layer, FSDPModule):
            # Without the hooks that gather and free its weights: they are no part of a graph.
            layer.forward = compiled(layer.forward)
        else:
            layer.compile(dynamic=dynamic, fullgraph=True, backend=backend)
    return len(layers)


def in_shards(model: nn.Module) -> bool:
    """Whether its layers are gathered as they run: something that no captured graph can do."""
    return any(isinstance(layer, FSDPModule) for layer in layers_of(model))


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """While entered, layers run as they were written, with whatever hooks and weights they have."""
    kept = [
        (layer, layer._compiled_call_impl, layer.__dict__.get("forward"))
        for layer in layers_of(model)
    ]
    run_uncompiled(model)
    try:
        yield
    finally:
        for layer, call, forward in kept:
            layer._compiled_call_impl = call
            if forward is not None:
                layer.forward = forward


def run_uncompiled(model: nn.Module) -> None:
    """From the next call on."""
    for layer in layers_of(model):
        layer._compiled_call_impl = None
        # The class's own is underneath.
        layer.__dict__.pop("forward", None)


def is_compile_error(error: BaseException) -> bool:
    """Of the compiler, not of the code that was compiled: without it the model may well run."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (TorchDynamoException, InductorError)):
            return True
        seen = seen.__cause__
    return False


def varies(tensor: torch.Tensor, dim: int) -> None:
    """Graphs that are given this tensor should not rely on this size."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def graphs_compiled() -> int:
    """So far in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
