"""Nano-batches that break off on purpose."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tlora.training.engine import Engine


@contextmanager
def breaking(
    engine: Engine, error: Callable[[], Exception], when: Callable[[torch.Tensor], bool], where: str
) -> Iterator[None]:
    """Raise in the second layer's forward, or in the first layer's backward when the second one's
    gradients are there already, in every nano-batch whose tokens `when` picks."""
    model = engine.super_model.model
    armed = False

    def look(module: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        nonlocal armed
        armed = when(kwargs["input_ids"])

    def fail_forward(module: object, args: object, output: object) -> None:
        if armed and where == "forward":
            raise error()

    def fail_backward(module: object, args: object, output: torch.Tensor) -> None:
        def fail(gradient: torch.Tensor) -> None:
            raise error()

        hidden = output[0] if isinstance(output, tuple) else output
        if armed and where == "backward" and hidden.requires_grad:
            hidden.register_hook(fail)

    handles = [
        model.model.register_forward_pre_hook(look, with_kwargs=True),
        model.model.layers[1].register_forward_hook(fail_forward),
        model.model.layers[0].register_forward_hook(fail_backward),
    ]
    yield
    for handle in handles:
        handle.remove()


def once(at: int) -> Callable[[torch.Tensor], bool]:
    """Picks one nano-batch by its number."""
    count = -1

    def when(ids: torch.Tensor) -> bool:
        nonlocal count
        count += 1
        return count == at

    return when


def full_device() -> Exception:
    return torch.OutOfMemoryError("the device is full")
