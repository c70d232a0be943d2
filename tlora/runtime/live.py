"""The live view of a run on a terminal: every job's progress and the group's totals, redrawn in
place.

A thread of its own redraws, so that the clock moves during a long nano-batch; it waits so long
between drawings that they take no more than a small share of the time.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tlora.runtime.directory import JobResult
from tlora.runtime.figures import loss_figure
from tlora.runtime.live_table import STYLES, JobRow, Line, RankRow, Totals, draw
from tlora.runtime.pace import Pace, Trend
from tlora.runtime.progress import (
    MANY_JOBS,
    Progress,
    ProgressLines,
    RankUsage,
    closing_lines,
    company,
    end_line,
    is_expected,
    join_line,
    with_driver,
    worth_a_line,
)
from tlora.training.compose import Kind
from tlora.training.driver import JobDriver, Status
from tlora.training.outcome import EvaluationDone, Outcome, StepDone

EVERY_SECONDS = 0.25
COST_SHARE = 0.005
"""Drawing may take this share of a core: on a slow machine it is done less often."""

ALL = ""
"""Stands for the group where a job's name would: no job is called so."""

RANK_PAST = 20
"""Of what each rank has told, once a second, its rate is taken over."""

WORDS = {
    Status.COMPLETED: "done",
    Status.STOPPED_EARLY: "stopped early",
    Status.CANCELLED: "cancelled",
    Status.PAUSED: "paused",
    Status.FAILED: "failed",
}


TRAINED = (Status.COMPLETED, Status.STOPPED_EARLY, Status.CANCELLED)


def choose_progress(out: TextIO | None = None) -> Progress:
    """The live view on a terminal that can show it, plain lines anywhere else."""
    console = Console(file=out or sys.stdout, highlight=False)
    unicode = console.encoding.startswith("utf")
    if console.is_terminal and not console.is_dumb_terminal and unicode:
        return LiveProgress(console)
    return ProgressLines(out)


@dataclass(frozen=True, slots=True)
class Screen:
    """Lines as rich takes them."""

    lines: list[Line]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            for text, style in line:
                yield Segment(text, console.get_style(style) if style else None)
            yield Segment.line()


class LiveProgress:
    def __init__(self, console: Console, every_seconds: float = EVERY_SECONDS) -> None:
        self.console = console
        self.every_seconds = every_seconds
        self.drawing_seconds = 0.0
        """Processor time spent drawing so far."""

        self._drivers: list[JobDriver] = []
        self._trends: dict[str, Trend] = {}
        self._tokens: dict[str, int] = {}
        self._evaluating: set[str] = set()
        self._told: set[str] = set()
        """Jobs whose ends were told: their files are on disk."""

        self._ranks: dict[int, deque[RankUsage]] = {}
        """By rank, the last of what each has told."""

        self._rows = 0
        self._stopping = False
        self._started = time.perf_counter()
        self._pace = Pace(self._started, {})
        self._live: Live | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def say(self, *lines: str) -> None:
        for line in lines:
            self.console.print(Text(line), soft_wrap=True)

    def start(self, drivers: list[JobDriver], budget_tokens: int) -> None:
        self._drivers = list(drivers)
        self._trends = {driver.name: Trend() for driver in drivers}
        self._tokens = {driver.name: 0 for driver in drivers}
        self._started = time.perf_counter()
        self._pace = Pace(self._started, self._counts())
        self.say(f"training {company(drivers)}, nano-batches of {budget_tokens} tokens")
        self._live = Live(
            console=self.console, get_renderable=self._draw, auto_refresh=False, transient=True
        )
        self._live.start()
        self._thread = threading.Thread(target=self._redraw, name="live view", daemon=True)
        self._thread.start()

    def join(self, driver: JobDriver) -> None:
        name = driver.name
        tokens = self._tokens.get(name, 0)
        self._trends, self._tokens = (
            {**self._trends, name: Trend()},
            {**self._tokens, name: tokens},
        )
        self._told.discard(name)
        self._pace.know({("tokens", name): tokens, ("step", name): driver.step})
        waited = is_expected(driver, self._drivers)
        # Last: whoever draws goes by this list.
        self._drivers = with_driver(self._drivers, driver)
        if not waited or len(self._drivers) < MANY_JOBS:
            self.say(join_line(driver))

    def on_nano_batch(self, outcome: Outcome) -> None:
        self._rows += outcome.rows
        for job, tokens in outcome.tokens.items():
            self._tokens[job] += tokens
        if outcome.kind is Kind.EVALUATE:
            self._evaluating.update(outcome.tokens)
        self._pace.mark(time.perf_counter(), self._counts)
        if outcome.error is not None:
            self.say(f"a nano-batch broke off and is run again: {outcome.error}")

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        self._trends[driver.name].add(done.loss)

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        self._evaluating.discard(driver.name)

    def on_end(self, result: JobResult) -> None:
        self._told.add(result.job)
        if worth_a_line(result, len(self._drivers)):
            self.say(end_line(result))

    def on_rank(self, usage: RankUsage) -> None:
        past = self._ranks.get(usage.rank)
        fewer = any(each[-1].ranks != usage.ranks for each in self._ranks.values())
        if fewer or (past and usage.seconds < past[-1].seconds):
            # Another group, perhaps of fewer.
            self._ranks = {}
        self._ranks.setdefault(usage.rank, deque(maxlen=RANK_PAST)).append(usage)

    def on_interrupt(self) -> None:
        # Called by a signal handler, perhaps in the midst of drawing: the next drawing says it.
        self._stopping = True

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def finish(self, results: list[JobResult], root: Path) -> None:
        self.close()
        self.console.print(self._final_table(results))
        seconds = time.perf_counter() - self._started
        self.say("", *closing_lines(results, root, sum(self._tokens.values()), seconds))

    def _counts(self) -> dict[tuple[str, str], int]:
        counts = {("tokens", job): tokens for job, tokens in self._tokens.items()}
        for driver in self._drivers:
            counts["step", driver.name] = driver.step
        counts["tokens", ALL] = sum(self._tokens.values())
        counts["trained", ALL] = sum(driver.tokens_seen for driver in self._drivers)
        return counts

    def _redraw(self) -> None:
        pause = self.every_seconds
        while not self._closed.wait(pause):
            # What it costs, not how long it waited for its turn.
            began = time.thread_time()
            if self._live is not None:
                self._live.refresh()
            took = time.thread_time() - began
            self.drawing_seconds += took
            pause = max(self.every_seconds, took / COST_SHARE)

    def _draw(self) -> "Screen":
        now = time.perf_counter()
        width, height = self.console.size
        rows = [self._row(driver, now) for driver in self._drivers]
        # The line below the last one belongs to the cursor.
        ranks = [rank_row(past) for _, past in sorted(self._ranks.copy().items())]
        return Screen(draw(rows, self._totals(now), width=width, height=height - 1, ranks=ranks))

    def _row(self, driver: JobDriver, now: float) -> JobRow:
        name, step = driver.name, driver.step
        status = WORDS.get(driver.status)
        if driver.status in TRAINED and name not in self._told:
            status = "saving"
        steps_per_s = self._pace.rate(("step", name), now, step)
        left = driver.total_steps - step
        return JobRow(
            name=name,
            status=status or self._activity(driver),
            step=step,
            total_steps=driver.total_steps,
            loss=driver.loss,
            trend=self._trends[name],
            eval_loss=driver.eval_loss,
            tokens_per_s=self._pace.rate(("tokens", name), now, self._tokens[name]),
            seconds_left=left / steps_per_s if steps_per_s and status is None else None,
        )

    def _activity(self, driver: JobDriver) -> str:
        if driver.status is Status.WAITING:
            return "waiting"
        if driver.name in self._evaluating:
            return "evaluating"
        return "training" if self._tokens[driver.name] else "waiting"

    def _totals(self, now: float) -> Totals:
        tokens = sum(self._tokens.values())
        trained = sum(driver.tokens_seen for driver in self._drivers)
        rate = self._pace.rate(("trained", ALL), now, trained)
        left = tokens_left(self._drivers)
        return Totals(
            tokens_per_s=self._pace.rate(("tokens", ALL), now, tokens),
            fill=tokens / self._rows if self._rows else None,
            seconds=now - self._started,
            seconds_left=left / rate if left is not None and rate > 0 else None,
            stopping=self._stopping,
        )

    def _final_table(self, results: list[JobResult]) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        table.add_column("job", overflow="fold")
        table.add_column("status")
        for title in ("steps", "loss", "held-out", "best"):
            table.add_column(title, justify="right")
        over = {result.job: result for result in results}
        for driver in self._drivers:
            if result := over.pop(driver.name, None):
                table.add_row(*final_cells(result))
            else:
                steps = f"{driver.step}/{driver.total_steps}"
                losses = (loss_figure(driver.loss), loss_figure(driver.eval_loss))
                word = "waits" if driver.status is Status.WAITING else "interrupted"
                table.add_row(driver.name, Text(word, "yellow"), steps, *losses, "")
        for result in over.values():
            table.add_row(*final_cells(result))
        return table


def rank_row(past: Sequence[RankUsage]) -> RankRow:
    """The rate is of the last while, the shares are of all."""
    first, last = past[0], past[-1]
    since_s, since = (first.seconds, first.tokens) if len(past) > 1 else (0.0, 0)
    return RankRow(
        rank=last.rank,
        jobs=last.jobs,
        tokens_per_s=(last.tokens - since) / max(last.seconds - since_s, 1e-9),
        empty=last.empty / max(1, last.turns),
        communication=last.communication_s / max(last.seconds, 1e-9),
    )


def tokens_left(drivers: list[JobDriver]) -> float | None:
    """What is still to be trained, from what a step of each job took so far; jobs of which that is
    not known yet are taken for average ones."""
    running = [driver for driver in drivers if driver.status in (Status.RUNNING, Status.WAITING)]
    stepped = [driver for driver in running if driver.step and driver.tokens_seen]
    each = {driver.name: driver.tokens_seen / driver.step for driver in stepped}
    if not each:
        return None
    average = sum(each.values()) / len(each)
    return sum(
        (driver.total_steps - driver.step) * each.get(driver.name, average) for driver in running
    )


def final_cells(result: JobResult) -> list[Text | str]:
    word = WORDS.get(Status(result.status), result.status)
    held_out = loss_figure(result.eval_loss)
    if result.first_eval_loss is not None:
        held_out = f"{loss_figure(result.first_eval_loss)} → {held_out}"
    best = ""
    if result.best_step is not None and result.best_eval_loss is not None:
        best = f"{loss_figure(result.best_eval_loss)} at {result.best_step}"
    steps = f"{result.steps}/{result.total_steps}"
    return [
        result.job,
        Text(word, STYLES[word]),
        steps,
        loss_figure(result.loss),
        held_out,
        best,
    ]
