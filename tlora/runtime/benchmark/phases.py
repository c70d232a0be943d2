"""Where the time of a fused step goes: forward, backward, optimiser, and the engine's own work.

Clocks are put around the functions that the engine calls, in a run of its own outside of the
measured rounds. On a device every phase is waited for, which hides nothing: what the engine does
while a device works counts in full, so its share is an upper bound there.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FunctionType

import torch

from tlora.model.super_model import SuperModel
from tlora.runtime.benchmark.machine import now
from tlora.training import optimiser

FORWARD, BACKWARD, OPTIMISER = "forward", "backward", "optimiser"


@dataclass(slots=True)
class Phases:
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys((FORWARD, BACKWARD, OPTIMISER), 0.0)
    )
    _inside: bool = False

    def overhead_pct(self, total_seconds: float) -> float | None:
        """The share of all that is none of these; None if one of them was never seen."""
        if not all(self.seconds.values()):
            return None
        return (1 - sum(self.seconds.values()) / total_seconds) * 100

    def clocked(self, phase: str, function: Callable, device: torch.device) -> Callable:
        """A phase called from another one belongs to that."""

        def run(*args: object, **options: object) -> object:
            if self._inside:
                return function(*args, **options)
            self._inside = True
            started = now(device)
            try:
                return function(*args, **options)
            finally:
                self.seconds[phase] += now(device) - started
                self._inside = False

        return run


@contextmanager
def clocked_phases(model: SuperModel) -> Iterator[Phases]:
    """While entered, the engine's calls are timed."""
    phases = Phases()
    places: list[tuple[object, str, str]] = [
        (model, "token_losses", FORWARD),
        (torch.autograd, "backward", BACKWARD),
        *(
            (optimiser, name, OPTIMISER)
            for name, value in vars(optimiser).items()
            if isinstance(value, FunctionType) and not name.startswith("_")
        ),
    ]
    with ExitStack() as stack:
        for owner, name, phase in places:
            if hasattr(owner, name):
                clocked = phases.clocked(phase, getattr(owner, name), model.device)
                stack.enter_context(_replaced(owner, name, clocked))
        yield phases


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
