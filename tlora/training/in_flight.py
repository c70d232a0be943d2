"""A nano-batch that was launched: what the device will say of it, and whom it concerns.

Losses, norms and checks are copied to host memory behind the kernels that make them, so the host
waits once, for the copies, and by then has launched the next nano-batch if the engine runs ahead.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from tlora.core.errors import JobFailed
from tlora.model.packing import PackedBatch, PackedSegment
from tlora.training.batch import Batch, Passage
from tlora.training.compose import Composition, Kind
from tlora.training.engine_job import EngineJob
from tlora.training.outcome import EvaluationDone, Outcome, StepDone


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedSteps:
    """Of jobs that were stepped in one call."""

    batches: list[Batch]
    norms: torch.Tensor
    """float32 [batches], in host memory once the nano-batch is through."""


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedEvaluation:
    job: EngineJob
    batch: Batch
    done: EvaluationDone
    """But for its loss and figures."""

    weights_are_finite: torch.Tensor


@dataclass(slots=True, eq=False)
class InFlight:
    composition: Composition | None
    """None if nothing had to run but steps were due."""

    group: int = 0
    """Of whom the engine was made up."""

    settled: bool = True
    """It took the time that its like will take."""

    started: float = field(default_factory=time.perf_counter)
    passages: list[Passage] = field(default_factory=list[Passage])
    steps: list[LaunchedSteps] = field(default_factory=list[LaunchedSteps])
    evaluations: list[LaunchedEvaluation] = field(default_factory=list[LaunchedEvaluation])
    failures: list[JobFailed] = field(default_factory=list[JobFailed])
    """Found while launching."""

    _losses: torch.Tensor | None = None
    _segments: list[PackedSegment] = field(default_factory=list[PackedSegment])
    _through: torch.cuda.Event | None = None

    @property
    def is_empty(self) -> bool:
        return self.composition is None and not (self.steps or self.evaluations or self.failures)

    @property
    def tokens(self) -> dict[str, int]:
        """By job."""
        return {
            passage.batch.job: sum(each.length for each in passage.fed) for passage in self.passages
        }

    def keep_losses(self, losses: torch.Tensor, batch: PackedBatch) -> None:
        """float32 [N], of the nano-batch's trained tokens."""
        self._losses = to_host(losses)
        self._segments = batch.segments

    def seal(self, device: torch.device) -> None:
        """Everything of it has been launched."""
        if device.type == "cuda":
            self._through = torch.cuda.Event()
            self._through.record()

    def wait(self) -> None:
        """Until its results are in host memory."""
        if self._through is not None:
            self._through.synchronize()

    def batches(self) -> Iterator[Batch]:
        """Of which it will say something; one may come twice."""
        yield from (passage.batch for passage in self.passages)
        yield from (batch for each in self.steps for batch in each.batches)
        yield from (each.batch for each in self.evaluations)

    def outcome(self, seconds: float) -> Outcome:
        """What it has brought in this time. Call `wait` before, and this once. Nothing is said of
        batches that were dropped."""
        steps: list[StepDone] = []
        evaluations: list[EvaluationDone] = []
        failures: list[JobFailed] = []
        for passage, sums in zip(self.passages, self._loss_sums(), strict=True):
            if self._is_reference:
                passage.batch.count_reference(passage.fed, sums)
            elif not passage.batch.dropped:
                passage.batch.count(passage.fed, sums)
            if not passage.batch.dropped:
                try:
                    if self._is_reference:
                        passage.batch.check_reference()
                    else:
                        passage.batch.check_loss()
                except JobFailed as failure:
                    passage.batch.dropped = True
                    failures.append(failure)
        for each in self.steps:
            for batch, norm in zip(each.batches, each.norms.tolist(), strict=True):
                if not batch.dropped:
                    try:
                        steps.append(batch.finish_step(norm))
                    except JobFailed as failure:
                        failures.append(failure)
        for each in self.evaluations:
            if not each.batch.dropped:
                try:
                    each.job.check_weights(bool(each.weights_are_finite))
                    each.batch.check_loss()
                    evaluations.append(self._evaluated(each))
                except JobFailed as failure:
                    failures.append(failure)
        composition = self.composition
        return Outcome(
            kind=composition.kind if composition else None,
            rows=composition.rows if composition else 0,
            tokens=self.tokens,
            seconds=seconds if composition else 0.0,
            steps=tuple(steps),
            evaluations=tuple(evaluations),
            failures=tuple(failures),
        )

    @property
    def _is_reference(self) -> bool:
        return self.composition is not None and self.composition.kind is Kind.REFERENCE

    def _evaluated(self, each: LaunchedEvaluation) -> EvaluationDone:
        return replace(each.done, loss=each.batch.loss, figures=each.batch.tally.figures())

    def _loss_sums(self) -> list[list[float]]:
        """Per passage, the summed loss of each of its sequences, in double precision: figures that
        do not depend on how a batch was cut."""
        if self._losses is None:
            return []
        host = self._losses.double()
        return [
            [float(part.sum()) for part in host[segment.targets].split(segment.sequence_targets)]
            for segment in self._segments
        ]


class UnderWay:
    """Nano-batches that were launched and of which nothing has been said, in their order."""

    def __init__(self) -> None:
        self._launched: deque[InFlight] = deque()
        self._last_arrival = 0.0

    def __len__(self) -> int:
        return len(self._launched)

    def add(self, launched: InFlight, device: torch.device) -> None:
        launched.seal(device)
        self._launched.append(launched)

    def first(self) -> tuple[InFlight, Outcome]:
        """Wait for the one that was launched first, and what it has brought."""
        arrived = self._launched.popleft()
        arrived.wait()
        now = time.perf_counter()
        # Of two that were launched together, the second one began when the first was through.
        seconds = now - max(arrived.started, self._last_arrival)
        self._last_arrival = now
        return arrived, arrived.outcome(seconds)

    def holds(self, batch: Batch) -> bool:
        return any(batch is each for launched in self._launched for each in launched.batches())

    def drop(self, job: str) -> None:
        """Nothing more will be said of this job's batches."""
        for launched in self._launched:
            for batch in launched.batches():
                batch.dropped |= batch.job == job


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is there when the device has come so far; nothing waits for it here."""
    tensor = tensor.detach()
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
