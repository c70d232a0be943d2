"""What a profile of bare nano-batches leaves to the workers, for fidelity.py: a pure fit.

A profile says how the work of a nano-batch grows with rows, lengths and ranks. What a nano-batch
and a job in it cost whatever they hold is fitted to groups that trained through workers, with one
factor on all the rest.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tlora.core.cluster import uniform_cluster
from tlora.core.request import JobRequest
from tlora.costs.fit import non_negative_least_squares
from tlora.costs.profile import Profile
from tlora.simulation.composed import ComposedCosts, composed_round


@dataclass(frozen=True, slots=True)
class GroupRate:
    """Jobs that were calibrated together on a worker."""

    jobs: tuple[JobRequest, ...]
    bucket: int
    token_s: float
    """Seconds per token."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """What workers make of a profile."""

    factor: float
    """On all times of the profile but the next two."""

    round_s: float
    """Of every nano-batch."""

    segment_s: float
    """Of every job in it."""

    attach_s: float
    end_s: float
    errors_pct: tuple[float, ...] = ()
    """Of each calibrated group's predicted seconds."""

    @property
    def line(self) -> str:
        pauses = {"attach": self.attach_s, "end": self.end_s}
        worst = max(self.errors_pct, key=abs, default=0.0)
        return (
            f"workers: x {self.factor:.3f}, {self.round_s * 1e3:.2f} ms a nano-batch and "
            f"{self.segment_s * 1e3:.2f} ms a job in it (worst group {worst:+.1f} %), "
            + ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in pauses.items())
        )

    @property
    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def slower(self, by: float) -> "Overheads":
        """On a machine of which everything takes 1 + `by` times as long."""
        return Overheads(
            factor=self.factor * (1 + by),
            round_s=self.round_s * (1 + by),
            segment_s=self.segment_s * (1 + by),
            attach_s=self.attach_s * (1 + by),
            end_s=self.end_s * (1 + by),
        )

    def on(self, profile: Profile) -> Profile:
        times, steps = profile.time, profile.steps
        scaled = {
            name: getattr(times, name) * self.factor
            for name in ("flat_s", "row_s", "square_s", "lora_s", "rank_s")
        }
        return replace(
            profile,
            time=replace(times, fixed_s=self.round_s, segment_s=self.segment_s, **scaled),
            steps=replace(
                steps,
                pass_s=steps.pass_s * self.factor,
                job_s=steps.job_s * self.factor,
                parameter_s=steps.parameter_s * self.factor,
            ),
            # A group's end is the end of its last job, whose adapter is written while its device
            # does nothing else; a start pays for it, for in a simulation an end is free.
            load_s=self.end_s,
            warmup_s=0.0,
            attach_s=self.attach_s,
            detach_s=self.end_s,
        )


def fit_overheads(
    profile: Profile, groups: Sequence[GroupRate], *, attach_s: float, end_s: float
) -> Overheads:
    """By relative errors, so that small groups count as much as large ones."""
    features = np.array([features_of(profile, group) for group in groups])
    measured = np.array([group.token_s for group in groups])
    fitted = non_negative_least_squares(features / measured[:, None], np.ones(len(measured)))
    errors = (features @ fitted / measured - 1) * 100
    return Overheads(
        factor=float(fitted[0]),
        round_s=float(fitted[1]),
        segment_s=float(fitted[2]),
        attach_s=attach_s,
        end_s=end_s,
        errors_pct=tuple(map(float, errors)),
    )


def features_of(profile: Profile, group: GroupRate) -> tuple[float, float, float]:
    """Of a token: what the profile says without what every nano-batch and every job in it cost,
    nano-batches, and jobs in them."""
    bare = replace(profile, time=replace(profile.time, fixed_s=0.0, segment_s=0.0))
    base = group.jobs[0].base
    costs = ComposedCosts({base: bare}, uniform_cluster(1))
    found = composed_round(
        costs.base(base),
        group.jobs,
        [costs.figures(job) for job in group.jobs],
        [1.0] * len(group.jobs),
        group.bucket,
    )
    tokens = sum(found.tokens)
    return found.seconds / tokens, 1 / tokens, found.segments / tokens
