"""What fusing gains on this machine: the same work done together and one job at a time.

Both sides run in the same engine on the same loaded model, so that a better engine is not counted
as a gain of fusing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tlora.core.job import JobSpec
from tlora.data.prepare import PreparedData
from tlora.model.super_model import SuperModel
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine
from tlora.training.loop import run_jobs
from tlora.training.outcome import EvaluationDone, Outcome, StepDone


@dataclass(frozen=True, slots=True)
class Comparison:
    """Sums over all rounds; a round is the same steps together and one at a time."""

    rounds: int
    steps: int
    """Of all jobs in one round."""

    tokens: int
    """Useful tokens of each side."""

    together_seconds: float
    alone_seconds: float

    @property
    def together_rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.together_seconds

    @property
    def alone_rate(self) -> float:
        return self.tokens / self.alone_seconds

    @property
    def gain(self) -> float:
        return self.alone_seconds / self.together_seconds


def compare(
    model: SuperModel,
    jobs: Sequence[JobSpec],
    data: dict[str, PreparedData],
    *,
    budget_tokens: int,
    share: float,
    seconds: float,
) -> Comparison:
    """Each job takes the first `share` of its steps, at least two and without evaluation; together,
    then one by one, round after round until `seconds` have passed. One round is always done."""
    short = [shortened(job, data[job.name], share) for job in jobs]
    engine = Engine(model, budget_tokens=budget_tokens)
    # Buffers and thread pools are made on first use, which must count for neither side.
    _run(engine, [replace(job, train=replace(job.train, max_steps=1)) for job in short], data)
    together = alone = 0.0
    tokens = rounds = 0
    started = time.perf_counter()
    while not rounds or time.perf_counter() - started < seconds:
        fused = _run(engine, short, data)
        single = [_run(engine, [job], data) for job in short]
        assert fused.tokens == sum(run.tokens for run in single), "the same work on both sides"
        together += fused.seconds
        alone += sum(run.seconds for run in single)
        tokens += fused.tokens
        rounds += 1
    return Comparison(
        rounds=rounds,
        steps=sum(job.train.max_steps or 0 for job in short),
        tokens=tokens,
        together_seconds=together,
        alone_seconds=alone,
    )


def shortened(job: JobSpec, data: PreparedData, share: float) -> JobSpec:
    total = JobDriver(job, data.train).total_steps
    steps = min(total, max(2, round(total * share)))
    return replace(job, train=replace(job.train, max_steps=steps))


@dataclass(frozen=True, slots=True)
class _Run:
    tokens: int
    seconds: float


def _run(engine: Engine, jobs: Sequence[JobSpec], data: dict[str, PreparedData]) -> _Run:
    """From attaching to the last step."""
    count = _TokenCount()
    started = time.perf_counter()
    drivers = [JobDriver(job, data[job.name].train) for job in jobs]
    for driver in drivers:
        driver.attach(engine, engine.super_model.new_adapter(driver.spec))
    run_jobs(engine, drivers, count)
    return _Run(count.tokens, time.perf_counter() - started)


class _TokenCount:
    """The least that the training loop can tell."""

    def __init__(self) -> None:
        self.tokens = 0

    def on_nano_batch(self, outcome: Outcome) -> None:
        pass

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        # Passes for the references of preference jobs are made once, and count for neither side.
        self.tokens += done.tokens

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        pass

    def on_end(self, driver: JobDriver) -> None:
        pass
