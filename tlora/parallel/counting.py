"""What communication costs: every collective of a run, counted by what it was for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum

import torch
import torch.distributed as dist


class Purpose(Enum):
    CONTROL = "control"
    """The control element: what runs next, and who is through."""

    BACKBONE = "backbone"
    """Frozen weights, gathered from the ranks that hold a part each."""

    GRADIENT = "gradient"
    """Of a job that spans ranks, at its own step."""

    FIGURES = "figures"
    """Losses of an evaluation that spans ranks, and why a job must leave."""

    MOVING = "moving"
    """Jobs that change ranks."""


@dataclass(slots=True)
class Tally:
    calls: int = 0
    num_bytes: int = 0
    """That reach this rank, its own part included."""

    seconds: float = 0.0
    """That this rank was in them, waiting for others included; 0 where nobody takes the time, as
    of gatherings that run beside the computing."""


@dataclass(slots=True)
class Counts:
    """Of one rank."""

    by_purpose: dict[Purpose, Tally] = field(
        default_factory=lambda: {purpose: Tally() for purpose in Purpose}
    )

    def add(self, purpose: Purpose, num_bytes: int) -> None:
        tally = self.by_purpose[purpose]
        tally.calls += 1
        tally.num_bytes += num_bytes

    @contextmanager
    def timed(self, purpose: Purpose) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.by_purpose[purpose].seconds += time.perf_counter() - began

    @property
    def seconds(self) -> float:
        return sum(tally.seconds for tally in self.by_purpose.values())

    def calls(self, purpose: Purpose) -> int:
        return self.by_purpose[purpose].calls

    def as_json(self) -> dict[str, dict[str, float]]:
        """Of what happened at all."""
        return {
            purpose.value: asdict(tally) | {"seconds": round(tally.seconds, 4)}
            for purpose, tally in self.by_purpose.items()
            if tally.calls
        }


def gather_into(
    output: torch.Tensor,
    own: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """torch's all-gather of one tensor, which has changed its name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, own, group=group, async_op=async_op)
