"""What a person sees while a run goes on: one line every few seconds, and a summary."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol, TextIO

from tlora.core.wording import number_of
from tlora.runtime.directory import JobResult
from tlora.runtime.figures import duration_figure, together
from tlora.training.driver import JobDriver, Status
from tlora.training.outcome import EvaluationDone, Outcome, StepDone

USAGE = "usage"
"""What ranks note of their `RankUsage`."""


@dataclass(frozen=True, slots=True)
class RankUsage:
    """Of a rank of a group, since it began to train."""

    rank: int
    ranks: int
    """Of its group."""

    jobs: Sequence[str]
    """That are there now, those that span ranks among them."""

    turns: int
    empty: int
    """Of these, without work."""

    tokens: int
    seconds: float
    communication_s: float
    """In collectives, waiting for other ranks included, as far as it is known."""


class Progress(Protocol):
    """A view of a run. It decides nothing."""

    def say(self, *lines: str) -> None: ...

    def start(self, drivers: list[JobDriver], budget_tokens: int) -> None:
        """Those that train, and those that wait for a place."""
        ...

    def join(self, driver: JobDriver) -> None:
        """A job comes while others train, for the first time or again, or waits for a place from
        now on."""
        ...

    def on_nano_batch(self, outcome: Outcome) -> None: ...

    def on_step(self, driver: JobDriver, done: StepDone) -> None: ...

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None: ...

    def on_end(self, result: JobResult) -> None: ...

    def on_rank(self, usage: RankUsage) -> None:
        """Of a run by a group of ranks: now and then, from each."""
        ...

    def on_interrupt(self) -> None:
        """Called by a signal handler: at any moment, in the main thread."""
        ...

    def close(self) -> None:
        """The run is over, or broken: leave the terminal as it was. May be called twice."""
        ...

    def finish(self, results: list[JobResult], root: Path) -> None:
        """The run came to its end, or was stopped: say what came of it."""
        ...


MANY_JOBS = 12
"""From here on what happens to each job is counted, not said, unless it is trouble."""


class ProgressLines:
    """Plain lines, for logs and for terminals alike."""

    def __init__(self, out: TextIO | None = None, every_seconds: float = 5.0) -> None:
        self.out = out or sys.stdout
        self.every_seconds = every_seconds
        self._drivers: list[JobDriver] = []
        self._started = self._said = time.perf_counter()
        self._tokens = 0
        self._evaluations = 0

    def say(self, *lines: str) -> None:
        for line in lines:
            print(line, file=self.out, flush=True)

    def start(self, drivers: list[JobDriver], budget_tokens: int) -> None:
        self._drivers = list(drivers)
        self._started = self._said = time.perf_counter()
        steps = sum(driver.total_steps for driver in drivers)
        self.say(
            f"training {company(drivers)}: {number_of(steps, 'step')}, nano-batches of "
            f"{budget_tokens} tokens"
        )

    def join(self, driver: JobDriver) -> None:
        waited = is_expected(driver, self._drivers)
        self._drivers = with_driver(self._drivers, driver)
        if not waited or len(self._drivers) < MANY_JOBS:
            self.say(join_line(driver))

    def on_nano_batch(self, outcome: Outcome) -> None:
        self._tokens += sum(outcome.tokens.values())
        if outcome.error is not None:
            self.say(f"a nano-batch broke off and is run again: {outcome.error}")
        now = time.perf_counter()
        if now - self._said >= self.every_seconds:
            self._said = now
            self.say(self._line(now))

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        pass

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        self._evaluations += 1
        if len(self._drivers) < MANY_JOBS:
            step = f"step {done.step}/{driver.total_steps}"
            figures = figures_of(done.figures)
            self.say(f"{driver.name}: {step} held-out loss {done.loss:.4f}{figures}")

    def on_end(self, result: JobResult) -> None:
        if worth_a_line(result, len(self._drivers)):
            self.say(end_line(result))

    def on_rank(self, usage: RankUsage) -> None:
        pass

    def on_interrupt(self) -> None:
        self.say("stopping after this nano-batch; press Ctrl-C again to leave at once")

    def close(self) -> None:
        pass

    def finish(self, results: list[JobResult], root: Path) -> None:
        seconds = time.perf_counter() - self._started
        self.say(*(self._summary(result, root) for result in results))
        self.say(*closing_lines(results, root, self._tokens, seconds))

    def _line(self, now: float) -> str:
        rate = self._tokens / (now - self._started)
        head = f"[{now - self._started:5.0f} s] {rate:,.0f} tokens/s"
        if len(self._drivers) >= MANY_JOBS:
            return f"{head} | {self._counts()}"
        running = [
            f"{driver.name} {driver.step}/{driver.total_steps}"
            + (f" loss {driver.loss:.3f}" if driver.loss is not None else "")
            for driver in self._drivers
            if driver.step < driver.total_steps and driver.status is Status.RUNNING
        ]
        shown = [head, *running[:6]]
        if len(running) > 6:
            shown[-1] += f" (+{len(running) - 6} more)"
        if waiting := sum(driver.status is Status.WAITING for driver in self._drivers):
            shown.append(f"{waiting} waiting")
        return " | ".join(shown)

    def _counts(self) -> str:
        """Many jobs as one."""
        step = sum(driver.step for driver in self._drivers)
        total = sum(driver.total_steps for driver in self._drivers)
        running = [driver for driver in self._drivers if driver.status is Status.RUNNING]
        parts = [
            f"{len(running)} of {len(self._drivers)} jobs running",
            f"step {step:,}/{total:,}",
        ]
        losses = [driver.loss for driver in running if driver.loss is not None]
        if losses:
            parts.append(f"median loss {median(losses):.3f}")
        if self._evaluations:
            parts.append(f"{self._evaluations:,} evaluations")
        return ", ".join(parts)

    def _summary(self, result: JobResult, root: Path) -> str:
        parts = [f"{result.job}: {result.status}"]
        if result.loss is not None:
            parts.append(f"loss {result.loss:.4f}")
        if result.eval_loss is not None and result.first_eval_loss is not None:
            parts.append(f"held-out {result.first_eval_loss:.4f} -> {result.eval_loss:.4f}")
        if result.best_step is not None:
            parts.append(f"best {result.best_eval_loss:.4f} at step {result.best_step}")
        parts.append(str(root / result.adapter) if result.adapter else "no adapter")
        return ", ".join(parts)


def figures_of(figures: dict[str, float]) -> str:
    """What is said of pairs beside their loss."""
    if not figures:
        return ""
    return f", accuracy {figures['accuracy']:.0%}, margin {figures['margin']:.3f}"


def worth_a_line(result: JobResult, jobs: int) -> bool:
    """Whether a job's end is said when it comes: among many, only what somebody should look at."""
    return jobs < MANY_JOBS or result.status in (Status.FAILED.value, Status.PAUSED.value)


def company(drivers: Sequence[JobDriver]) -> str:
    """How many train, and how many wait."""
    waiting = sum(driver.status is Status.WAITING for driver in drivers)
    more = f", {waiting} more in turn" if waiting else ""
    return together(len(drivers) - waiting) + more


def with_driver(drivers: Sequence[JobDriver], driver: JobDriver) -> list[JobDriver]:
    """Where it has waited among these, or the last."""
    if is_expected(driver, drivers):
        return [driver if each.name == driver.name else each for each in drivers]
    return [*(each for each in drivers if each.name != driver.name), driver]


def is_expected(driver: JobDriver, drivers: Sequence[JobDriver]) -> bool:
    """It has waited for its place among these."""
    return any(each.name == driver.name and each.status is Status.WAITING for each in drivers)


def join_line(driver: JobDriver) -> str:
    if driver.status is Status.WAITING:
        why = f": {driver.reason}" if driver.reason else ""
        return f"{driver.name}: waits for a place{why}"
    after = f" after step {driver.step}" if driver.step else ""
    left = number_of(driver.total_steps - driver.step, "step")
    return f"{driver.name}: joins{after}, {left} to go"


def over_before(result: JobResult) -> str:
    """Of a job that is not run again."""
    return f"{result.job}: {result.status} before, after {number_of(result.steps, 'step')}"


def end_line(result: JobResult) -> str:
    why = f": {result.reason}" if result.reason else ""
    return f"{result.job}: {result.status} after {number_of(result.steps, 'step')}{why}"


def closing_lines(results: list[JobResult], root: Path, tokens: int, seconds: float) -> list[str]:
    """How fast it was, where everything is, and how to serve one of the adapters: the commands are
    long, so the others' are left to their files."""
    rate = tokens / max(seconds, 1e-9)
    lines = [f"{tokens:,} tokens in {duration_figure(seconds)}, {rate:,.0f} tokens/s together"]
    if any(result.adapter for result in results):
        lines.append(f"adapters: {root / '<job>' / 'adapter'}")
    if (report := root / "report.html").exists():
        lines.append(f"report:   {report}")
    served = next((result for result in results if result.serving), None)
    if served is not None:
        lines += [f"serve {served.job}: {command}" for command in served.serving]
        if sum(bool(result.serving) for result in results) > 1:
            lines.append(f"the other jobs' commands are in {root / '<job>' / 'result.json'}")
    return lines
