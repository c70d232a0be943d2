"""Where the time of a fused step goes: forward, backward, optimiser, and the engine's own work.

Clocks are put around the functions that the engine calls, in a run of its own outside of the
measured rounds. `Phases` waits for the device at every one, which hides nothing: what the engine
does while a device works counts in full. `Spans` waits for nothing and reads the device's own
clock: what is left between two phases is work of the engine that the device did not hide.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
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

    def overhead_pct(self, total_seconds: float) -> float | None:
        """The share of all that is none of these; None if one of them was never seen."""
        if not all(self.seconds.values()):
            return None
        return (1 - sum(self.seconds.values()) / total_seconds) * 100

    @contextmanager
    def clocked(self, phase: str, device: torch.device) -> Iterator[None]:
        started = now(device)
        try:
            yield
        finally:
            self.seconds[phase] += now(device) - started


@dataclass(slots=True)
class Spans:
    """When the device began and ended what each phase launched."""

    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @contextmanager
    def marked(self, _phase: str) -> Iterator[None]:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        try:
            yield
        finally:
            ended.record()
            self.events.append((begun, ended))

    def waits_pct(self) -> float | None:
        """None if no phase was seen twice."""
        torch.cuda.synchronize()
        if len(self.events) < 2:
            return None
        at = self.events[0][0].elapsed_time
        return waits_pct([(at(begun), at(ended)) for begun, ended in self.events])


def waits_pct(spans: Sequence[tuple[float, float]]) -> float:
    """What part of the time from the first beginning to the last end lies between spans."""
    between = sum(begun - ended for (_, ended), (begun, _) in pairwise(spans))
    return 100 * between / (spans[-1][1] - spans[0][0])


@contextmanager
def clocked_phases(model: SuperModel) -> Iterator[Phases]:
    """While entered, the engine's calls are timed."""
    phases = Phases()
    with _wrapped_phases(model, partial(phases.clocked, device=model.device)):
        yield phases


@contextmanager
def marked_phases(model: SuperModel) -> Iterator[Spans]:
    """While entered, the engine's calls are marked on the device's clock."""
    spans = Spans()
    with _wrapped_phases(model, spans.marked):
        yield spans


@contextmanager
def _wrapped_phases(
    model: SuperModel, around: Callable[[str], AbstractContextManager[None]]
) -> Iterator[None]:
    """A phase called from another one belongs to that."""
    inside = False

    def wrapped(phase: str, function: Callable) -> Callable:
        def run(*args: object, **options: object) -> object:
            nonlocal inside
            if inside:
                return function(*args, **options)
            inside = True
            try:
                with around(phase):
                    return function(*args, **options)
            finally:
                inside = False

        return run

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
                stack.enter_context(_replaced(owner, name, wrapped(phase, getattr(owner, name))))
        yield


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
