"""A super-model with jobs attached, and nano-batches of a chosen shape run through its engine.

All jobs stay attached; a nano-batch holds those that are fed. It is timed as training runs it:
composing, packing, forward, loss, backward. Then its jobs step, on a clock of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tlora.core.job import JobSpec
from tlora.core.sequence import TokenSequence
from tlora.costs.memory import BYTES_PER_ADAPTER_PARAMETER
from tlora.costs.model import NanoBatch, Segment
from tlora.model.adapters import AdapterWeights, LoraPair
from tlora.model.super_model import SuperModel
from tlora.model.targets import Target
from tlora.runtime.benchmark.machine import Clock, free_for_training, now
from tlora.runtime.profiling.grid import Plan, dealt
from tlora.training.engine import Engine
from tlora.training.moving import bring_weights

LEARNING_RATE = 1e-5
SCALE = 1.0
MANY_ROUNDS = 8
VISIT_SECONDS = 0.15
MOST_PER_VISIT = 5


class NotMeasured(Exception):
    """A nano-batch did not run, for the reason given."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One look at a nano-batch."""

    seconds: float
    step_seconds: float
    peak_bytes: int | None


class AsPlanned(Engine):
    """A nano-batch has the rows that were planned for it, however full it is."""

    def _buckets(self, budget: int) -> tuple[int, ...]:
        return (budget,)


class Rig:
    def __init__(
        self, model: SuperModel, *, ranks: Sequence[int], weights_bytes: int, reserved_rank: int
    ) -> None:
        self.model = model
        self.device = model.device
        self.targets = list(model.targets.values())
        self.parameters_per_rank = widths(self.targets)
        self.counted_bytes = (
            weights_bytes + BYTES_PER_ADAPTER_PARAMETER * self.parameters_per_rank * reserved_rank
        )
        self.engine = AsPlanned(model, budget_tokens=64)
        self._generator = np.random.Generator(np.random.PCG64(0))
        self._tokens = self._generator.integers(0, model.vocabulary, 2**16).astype(np.int32)
        bare = self.targets[:1]
        self.jobs = [
            *(_Job(f"job-{i}", rank, self.targets, 1.0) for i, rank in enumerate(ranks)),
            _Job("bare", 1, bare, widths(bare) / self.parameters_per_rank),
        ]
        for job in self.jobs:
            self._attach(job)

    def shape_of(self, plan: Plan) -> NanoBatch:
        hands = dealt(plan.lengths, plan.team)
        return NanoBatch(
            rows=plan.rows,
            squares=sum(length**2 for length in plan.lengths),
            segments=tuple(
                Segment(sum(lengths), self.jobs[place].rank, self.jobs[place].coverage)
                for place, lengths in hands.items()
            ),
        )

    def parameters_of(self, plan: Plan) -> int:
        """Adapter parameters of the jobs that take part."""
        return sum(
            self.jobs[place].rank * widths(self.jobs[place].targets)
            for place in dealt(plan.lengths, plan.team)
        )

    def visit(self, plan: Plan, *, expected_seconds: float | None = None) -> Visit:
        """Raises NotMeasured, and leaves the engine as it was, if the nano-batch breaks off. Quick
        ones run several times, and each counts for its part of the time."""
        hands = [
            (self.jobs[place].name, [self._sequence(length) for length in lengths])
            for place, lengths in dealt(plan.lengths, plan.team).items()
        ]
        many = 1
        if expected_seconds:
            many = max(1, min(MOST_PER_VISIT, int(VISIT_SECONDS / expected_seconds)))
        self.engine.budget_tokens = plan.rows
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            # In training the device has work when a nano-batch is launched, so here too.
            self._pass(hands)
        clock = Clock(self.device)
        for _ in range(many):
            self._pass(hands)
        seconds = clock.stop()
        peak = torch.cuda.max_memory_allocated(self.device) if on_cuda else None
        for name, _ in hands:
            self.engine.request_step(name, learning_rate=LEARNING_RATE, max_grad_norm=1.0)
        requested = now(self.device)
        # A round is enough now; an engine may also step behind the next nano-batch.
        for _ in range(MANY_ROUNDS):
            if not self.engine.has_work():
                break
            self._run()
        stepped = now(self.device)
        return Visit(
            seconds=seconds / many,
            step_seconds=stepped - requested,
            peak_bytes=None if peak is None else max(0, peak - self.counted_bytes),
        )

    def pauses(self, spec: JobSpec, plan: Plan, *, repeats: int) -> tuple[list[float], list[float]]:
        """Seconds for which nobody trains when one more job comes, whose adapter was brought to the
        device and whose rows were found before, and when it goes with a snapshot of its state."""
        weights = bring_weights(self.model, "one-more", self.model.new_adapter(spec)).result()
        attach: list[float] = []
        detach: list[float] = []
        for _ in range(repeats):
            self.visit(plan)
            berth = self.model.keep_rows("one-more", weights)
            started = free_for_training(self.device)
            self.engine.attach("one-more", weights, scale=SCALE)
            attached = free_for_training(self.device)
            state = self.engine.snapshot("one-more")
            self.engine.detach("one-more")
            attach.append(attached - started)
            detach.append(free_for_training(self.device) - attached)
            state.result()
            del berth
        return attach, detach

    def empty(self) -> None:
        """All jobs leave, for good."""
        for name in self.engine.jobs:
            self.engine.detach(name)

    def _pass(self, hands: Sequence[tuple[str, list[TokenSequence]]]) -> None:
        """One nano-batch, without steps."""
        for name, rows in hands:
            targets = sum(row.num_targets for row in rows)
            self.engine.feed(name, rows, loss_scale=1 / targets)
        self._run()

    def _run(self) -> None:
        outcome = self.engine.run_nano_batch()
        reason = outcome.error or next(map(str, outcome.failures), None)
        if reason is not None:
            self._start_over()
            short = "out of memory" if "out of memory" in reason else reason
            raise NotMeasured(short.splitlines()[0])

    def _start_over(self) -> None:
        """What was fed is forgotten, and whoever failed comes back."""
        for name in self.engine.jobs:
            self.engine.detach(name)
        for job in self.jobs:
            self._attach(job)

    def _attach(self, job: "_Job") -> None:
        self.engine.attach(job.name, job.random_weights(self.device), scale=SCALE)

    def _sequence(self, length: int) -> TokenSequence:
        start = int(self._generator.integers(0, len(self._tokens)))
        ids = np.take(self._tokens, np.arange(start, start + length), mode="wrap")
        return TokenSequence(ids, ids)


@dataclass(frozen=True, slots=True)
class _Job:
    name: str
    rank: int
    targets: list[Target]
    coverage: float

    def random_weights(self, device: torch.device) -> AdapterWeights:
        """Both matrices: products with zeros would be too easy for a device."""
        return {
            target.path: LoraPair(
                a=torch.randn(self.rank, target.in_features, device=device)
                * target.in_features**-0.5,
                b=torch.randn(target.out_features, self.rank, device=device) * 1e-3,
            )
            for target in self.targets
        }


def widths(targets: Sequence[Target]) -> int:
    """Adapter parameters per unit of rank."""
    return sum(target.in_features + target.out_features for target in targets)
