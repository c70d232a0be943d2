"""When a job that runs is told of as slower than its bound allows: one rule for real groups, whose
rates are measured, and simulated ones, whose rates are known."""

from collections.abc import Iterable, Mapping, Sequence

from tlora.core.event import SlowdownBreach
from tlora.core.request import JobRequest
from tlora.costs.groups import Costs

WINDOW_S = 30.0
FEWEST_STEPS = 20
"""A group's rates count when it has gone on for so long unchanged, and its jobs have made so many
steps together."""

NOISE = 1.3
"""A job's slowdown must be above its bound by this factor to be told of."""


class Breaches:
    """Tells of a job once for each company that it is in."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._told: set[tuple[str, str]] = set()

    def find(
        self,
        now: float,
        requests: Sequence[JobRequest],
        rates: Iterable[float],
        fair_gpus: Mapping[str, float],
        best: float = 1.0,
    ) -> list[SlowdownBreach]:
        """Of one group; `rates` are the steps per second of its jobs. `best`: the rate of the best
        device against predictions, which may all be off alike. It does not count as told yet."""
        company = company_of(requests)
        events: list[SlowdownBreach] = []
        for request, rate in zip(requests, rates, strict=True):
            due = fair_gpus.get(request.name, 0.0) / request.gpus
            due *= best / self.costs.figures(request).solo_step_s
            slowdown = due / max(rate, 1e-9)
            if is_breach(slowdown, request) and (request.name, company) not in self._told:
                events.append(SlowdownBreach(now, request.name, round(slowdown, 2)))
        return events

    def told(self, events: Iterable[SlowdownBreach], requests: Sequence[JobRequest]) -> None:
        company = company_of(requests)
        self._told |= {(event.job, company) for event in events}


def is_breach(slowdown: float, request: JobRequest) -> bool:
    return slowdown > NOISE * request.slowdown_bound


def most_due(request: JobRequest, rate: float, solo_step_s: float) -> float:
    """GPUs: a job that makes so many steps per second is not in breach while it is due no more.
    Rounded down, so that `is_breach` has the last word."""
    return NOISE * request.slowdown_bound * request.gpus * solo_step_s * rate * (1 - 1e-9)


def company_of(requests: Iterable[JobRequest]) -> str:
    return ",".join(request.name for request in requests)
