"""A job as the scheduler sees it when it is submitted; never changes after that."""

import math
from dataclasses import dataclass

from tlora.core.errors import SpecError
from tlora.core.load import JobLoad

SLOWDOWN_BOUND = 1.5
"""Where nobody says; 1.0 means never slower than its fair due."""

PRIORITIES = (1e-9, 1e9)
"""The least and the most: beyond these a due is lost in rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    name: str
    base: str
    """Only jobs of one base can share a group. Names a profile of the costs."""

    load: JobLoad
    """Rank, batch size, lengths; its weight is the user's own, between jobs that are alike."""

    total_steps: int
    """Optimiser steps that it asks for; it may end before."""

    gpus: int = 1
    """GPUs it brings: what it would run on alone. Its solo rate is the rate on these, and its
    fair due is never more than these. More than its batch has sequences are of no use to it."""

    arrival_s: float = 0.0
    tenant: str = "default"
    priority: float = 1.0
    """Its part of its tenant's GPUs, against the tenant's other jobs: 2 is due twice as much."""

    slowdown_bound: float = SLOWDOWN_BOUND
    """D: no decision may make its predicted rate lower than its fair rate / D."""

    def __post_init__(self) -> None:
        for name in ("total_steps", "gpus"):
            if getattr(self, name) < 1:
                raise SpecError(
                    f"must be at least 1, got {getattr(self, name)}", job=self.name, field=name
                )
        if not math.isfinite(self.arrival_s):
            raise SpecError(
                f"must be a time, got {self.arrival_s}", job=self.name, field="arrival_s"
            )
        least, most = PRIORITIES
        if not least <= self.priority <= most:
            raise SpecError(
                f"must be between {least:g} and {most:g}, got {self.priority:g}",
                job=self.name,
                field="priority",
            )
        if not self.slowdown_bound >= 1:
            raise SpecError(
                f"must be at least 1, got {self.slowdown_bound}",
                job=self.name,
                field="slowdown_bound",
            )

    @property
    def total_tokens(self) -> float:
        return self.total_steps * self.load.batch_tokens
