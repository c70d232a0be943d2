"""Our own engine as a benchmark's arms: all jobs together, and one job at a time.

Both go through the drivers and the loop that `tlora train` uses. Setting adapters up and taking
them away is outside of the clock here and for PEFT; `pauses` measures it by itself. New adapters
are drawn once for a benchmark (`draw_adapters`): in a large model that takes seconds.
"""

import statistics
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tlora.core.errors import JobFailed
from tlora.core.job import JobSpec
from tlora.model.adapters import AdapterWeights
from tlora.model.super_model import SuperModel
from tlora.runtime.benchmark.machine import free_for_training, now
from tlora.runtime.benchmark.rounds import Run
from tlora.runtime.benchmark.workload import Done, Workload
from tlora.training.driver import JobDriver, Status
from tlora.training.engine import Engine
from tlora.training.loop import run_jobs
from tlora.training.moving import bring_weights
from tlora.training.outcome import EvaluationDone, Outcome, StepDone

Adapters = Mapping[str, AdapterWeights]
"""The start of each job's adapter, in host memory: attaching copies it."""


def draw_adapters(model: SuperModel, jobs: Sequence[JobSpec]) -> Adapters:
    return {job.name: model.new_adapter(job) for job in jobs}


class TimedEngine(Engine):
    """Knows how long jobs took to leave: jobs leave while others still train."""

    detach_seconds = 0.0

    def detach(self, name: str) -> None:
        started = now(self.super_model.device)
        super().detach(name)
        self.detach_seconds += now(self.super_model.device) - started


class Counter:
    """An observer that counts work, and keeps the losses."""

    def __init__(self) -> None:
        self.tokens = self.sequences = self.steps = self.nano_batches = 0
        self.sizes: Tally[int] = Tally()
        """Nano-batches by their rows."""

        self.losses: dict[str, list[float]] = {}

    def on_nano_batch(self, outcome: Outcome) -> None:
        self.tokens += sum(outcome.tokens.values())
        self.nano_batches += 1
        self.sizes[outcome.rows] += 1

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        self.steps += 1
        self.sequences += done.sequences
        self.losses.setdefault(driver.name, []).append(done.loss)

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        pass

    def on_end(self, driver: JobDriver) -> None:
        if driver.status is not Status.COMPLETED:
            raise JobFailed(driver.reason or driver.status.value, job=driver.name)

    @property
    def done(self) -> Done:
        return Done(self.tokens, self.sequences, self.steps)


def train_together(
    model: SuperModel,
    work: Workload,
    jobs: Sequence[JobSpec],
    budget_tokens: int,
    counter: Counter | None = None,
    *,
    adapters: Adapters | None = None,
) -> Run:
    """From the first composition to the last step of these jobs."""
    counter = counter or Counter()
    adapters = adapters or draw_adapters(model, jobs)
    engine = TimedEngine(model, budget_tokens=budget_tokens)
    drivers = [JobDriver(job, work.rows[job.name]) for job in jobs]
    for driver in drivers:
        driver.attach(engine, adapters[driver.name])
    started = now(model.device)
    run_jobs(engine, drivers, counter)
    seconds = now(model.device) - started - engine.detach_seconds
    return Run(seconds, counter.done)


def train_one_at_a_time(
    model: SuperModel, work: Workload, budget_tokens: int, *, adapters: Adapters | None = None
) -> Run:
    """The same jobs in the same engine, each alone."""
    runs = [
        train_together(model, work, [job], budget_tokens, adapters=adapters) for job in work.jobs
    ]
    return Run(
        sum(run.seconds for run in runs),
        Done(
            sum(run.done.tokens for run in runs),
            sum(run.done.sequences for run in runs),
            sum(run.done.steps for run in runs),
        ),
    )


@dataclass(frozen=True, slots=True)
class Pauses:
    """What the neighbours wait when one more job comes or goes: medians."""

    attach_seconds: float
    """Its adapter was brought to the device before, while they trained."""

    attach_from_host_seconds: float
    """It was not: the copy is waited for."""

    detach_seconds: float
    """With a snapshot of its state, which reaches the host while they train."""


PAUSES = 7


def pauses(
    model: SuperModel,
    work: Workload,
    budget_tokens: int,
    *,
    repeats: int = PAUSES,
    adapters: Adapters | None = None,
) -> Pauses:
    """With all jobs attached, between nano-batches: for how long neither host nor device can go on
    with the next one."""
    adapters = adapters or draw_adapters(model, work.jobs)
    engine = Engine(model, budget_tokens=budget_tokens)
    drivers = [JobDriver(job, work.rows[job.name]) for job in work.jobs]
    for driver in drivers:
        driver.attach(engine, adapters[driver.name])
    last = work.jobs[-1]
    one_more = JobDriver(replace(last, name="one-more"), work.rows[last.name])
    attach: list[float] = []
    from_host: list[float] = []
    detach: list[float] = []
    for number in range(2 * (repeats + 1)):
        for driver in drivers:
            driver.advance(engine)
        for step in engine.run_nano_batch().steps:
            next(driver for driver in drivers if driver.name == step.job).on_step(step)
        weights, berth = adapters[last.name], None
        if number % 2:
            weights = bring_weights(model, one_more.name, weights).result()
            berth = model.keep_rows(one_more.name, weights)
        started = free_for_training(model.device)
        one_more.attach(engine, weights)
        attached = free_for_training(model.device)
        state = engine.snapshot(one_more.name)
        engine.detach(one_more.name)
        detach.append(free_for_training(model.device) - attached)
        (attach if number % 2 else from_host).append(attached - started)
        state.result()
        # Giving gigabytes of host memory back takes a tenth of a second: not under the clock.
        del state, berth
    for driver in drivers:
        engine.detach(driver.name)
    # The first ones warm up.
    return Pauses(
        attach_seconds=statistics.median(attach[1:]),
        attach_from_host_seconds=statistics.median(from_host[1:]),
        detach_seconds=statistics.median(detach[2:]),
    )
