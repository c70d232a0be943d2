"""What a person sees of a sweep: a leaderboard on a terminal, lines anywhere else, and a summary.

The view is also the recorder's `Progress`; it decides nothing.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tlora.core.wording import number_of
from tlora.runtime.directory import JobResult
from tlora.runtime.figures import duration_figure, loss_figure, rate_figure
from tlora.runtime.progress import RankUsage
from tlora.training.driver import JobDriver
from tlora.training.outcome import EvaluationDone, Outcome, StepDone
from tlora.tuning.events import Action, Added, Event, Exit, Failed, Spent
from tlora.tuning.results import Study, TrialResult
from tlora.tuning.study import Phase, StudyState, Trial

QUIET = ("saved at step", "saved where they are", "goes on after step", "go on where they stopped")
"""Trials come and go all the time."""

EVERY_SECONDS = 0.5
COST_SHARE = 0.01
FEW_EXITS = 6
"""Exits at once that are said one by one."""

STYLES = {
    Phase.WAITING: "dim",
    Phase.RUNNING: "",
    Phase.HELD: "cyan",
    Phase.READY: "cyan",
    Phase.COMPLETED: "green",
    Phase.EXITED: "yellow",
    Phase.FAILED: "bold red",
}


class View:
    """Lines."""

    def __init__(self, out: TextIO | None = None, every_seconds: float = 5.0) -> None:
        self.out = out or sys.stdout
        self.every_seconds = every_seconds
        self.ended: Callable[[JobResult], None] = lambda result: None
        """Told when a trial's files are on disk."""

        self.drivers: dict[str, JobDriver] = {}
        self.state: StudyState | None = None
        self._tokens = 0
        self._started = self._said = time.perf_counter()

    def begin(self, state: StudyState) -> None:
        self.state = state
        self._started = self._said = time.perf_counter()

    def on_turn(self, state: StudyState, event: Event, actions: Sequence[Action]) -> None:
        exits = [action for action in actions if isinstance(action, Exit)]
        task = self.task_of(state)
        if isinstance(event, Added):
            refused = [t for p in event.plans if (t := state.trials[p.name]).phase is Phase.FAILED]
            self.say(*(f"{trial.name}: cannot be tried: {trial.reason}" for trial in refused))
        if isinstance(event, Failed):
            self.say(f"{event.trial}: failed at step {event.step}: {event.reason}")
        if isinstance(event, Spent):
            self.say(
                f"{task}the sweep ends: {event.spent:,.0f} of {event.limit:,.0f} {event.what} used"
            )
        if len(exits) <= FEW_EXITS:
            self.say(*(str(each) for each in exits))
        else:
            rules = Counter(each.verdict.rule for each in exits)
            self.say(
                *(
                    f"{task}{number_of(count, 'trial')} given up: {rule}"
                    for rule, count in rules.items()
                )
            )
        if exits and exits[0].verdict.rule == "underperforming":
            going = sum(trial.live for trial in state.trials.values())
            self.say(f"{task}all have warmed up: {going} of {len(state.trials)} trials go on")

    def task_of(self, state: StudyState) -> str:
        """What lines that name no trial begin with."""
        return ""

    def say(self, *lines: str) -> None:
        for line in lines:
            if not any(quiet in line for quiet in QUIET):
                self.write(line)

    def write(self, line: str) -> None:
        print(line, file=self.out, flush=True)

    def start(self, drivers: list[JobDriver], budget_tokens: int) -> None:
        self.drivers |= {driver.name: driver for driver in drivers}

    def join(self, driver: JobDriver) -> None:
        self.drivers[driver.name] = driver

    def on_nano_batch(self, outcome: Outcome) -> None:
        self._tokens += sum(outcome.tokens.values())
        if outcome.error is not None:
            self.say(f"a nano-batch broke off and is run again: {outcome.error}")
        now = time.perf_counter()
        if now - self._said >= self.every_seconds:
            self._said = now
            self.tick()

    def tick(self) -> None:
        self.write(f"[{time.perf_counter() - self._started:5.0f} s] {self.counts()}")

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        pass

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        pass

    def on_end(self, result: JobResult) -> None:
        self.drivers.pop(result.job, None)
        self.ended(result)

    def on_rank(self, usage: RankUsage) -> None:
        pass

    def on_interrupt(self) -> None:
        self.say("stopping after this nano-batch; press Ctrl-C again to leave at once")

    def close(self) -> None:
        pass

    def finish(self, results: list[JobResult], root: Path) -> None:
        pass

    def summary(self, study: Study) -> None:
        self.say(*closing_lines(study))

    def rate(self) -> float:
        return self._tokens / max(time.perf_counter() - self._started, 1e-9)

    def counts(self) -> str:
        state = self.state
        if state is None:
            return ""
        # A list: another thread may draw while a trial is added.
        phases = Counter(trial.phase.value for trial in list(state.trials.values()))
        parts = [f"{phases[each.value]} {each.value}" for each in Phase if phases[each.value]]
        best = state.best
        leader = (
            f" | best {best.name}: {state.objective.metric} {state.value(best):.4f}" if best else ""
        )
        return f"{rate_figure(self.rate())} tokens/s | {', '.join(parts)}{leader}"


class LiveView(View):
    """The leaderboard, redrawn in place by a thread of its own."""

    def __init__(self, console: Console) -> None:
        super().__init__(every_seconds=float("inf"))
        self.console = console
        self._live: Live | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def begin(self, state: StudyState) -> None:
        super().begin(state)
        self._live = Live(
            console=self.console, get_renderable=self._draw, auto_refresh=False, transient=True
        )
        self._live.start()
        self._thread = threading.Thread(target=self._redraw, name="leaderboard", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)

    def on_interrupt(self) -> None:
        self._stopping = True

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def summary(self, study: Study) -> None:
        self.close()
        lines = closing_lines(study, most=0)
        self.console.print(final_table(study))
        self.say("", *lines)

    def _redraw(self) -> None:
        pause = EVERY_SECONDS
        while not self._closed.wait(pause):
            began = time.thread_time()
            if self._live is not None:
                self._live.refresh()
            pause = max(EVERY_SECONDS, (time.thread_time() - began) / COST_SHARE)

    def _draw(self) -> Table | Text:
        if self.state is None:
            return Text("")
        room = max(3, self.console.size.height - 5)
        return leaderboard(self.state, dict(self.drivers), room, self._footer())

    def _footer(self) -> str:
        gone = duration_figure(time.perf_counter() - self._started)
        stopping = "  stopping after this nano-batch" if self._stopping else ""
        return f"{gone} gone | {self.counts()}{stopping}"


def choose_view(out: TextIO | None = None) -> View:
    """The leaderboard on a terminal that can show it, lines anywhere else."""
    console = Console(file=out or sys.stdout, highlight=False)
    unicode = console.encoding.startswith("utf")
    if console.is_terminal and not console.is_dumb_terminal and unicode:
        return LiveView(console)
    return View(out)


def leaderboard(
    state: StudyState, drivers: dict[str, JobDriver], rows: int, footer: str = ""
) -> Table:
    """The best first, those that run before those that are over."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, caption=footer)
    table.caption_justify = "left"
    ranked = state.ranked()
    names = list(dict.fromkeys(name for trial in ranked for name in trial.plan.params))
    for title in ("", "trial", *(name.rpartition(".")[2] for name in names)):
        table.add_column(title, no_wrap=True)
    for title in ("step", "loss", state.objective.metric):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    shown = (
        sorted(ranked, key=lambda trial: not trial.live)[:rows] if len(ranked) > rows else ranked
    )
    places = {trial.name: place for place, trial in enumerate(ranked, 1)}
    for trial in sorted(shown, key=lambda trial: places[trial.name]):
        driver = drivers.get(trial.name)
        value = state.value(trial)
        step = driver.step if driver and trial.phase is Phase.RUNNING else trial.step
        table.add_row(
            str(places[trial.name]) if value is not None else "",
            trial.name,
            *(setting_figure(trial.plan.params.get(name)) for name in names),
            f"{step}/{trial.plan.total_steps}",
            loss_figure(driver.loss if driver else None),
            loss_figure(value),
            Text(status_words(trial), STYLES[trial.phase]),
        )
    if len(ranked) > len(shown):
        table.add_row("", f"+ {len(ranked) - len(shown)} more")
    return table


def status_words(trial: Trial) -> str:
    if trial.phase is Phase.EXITED:
        return trial.verdict.rule if trial.verdict else "exited"
    return {Phase.HELD: "warmed up", Phase.READY: "goes on"}.get(trial.phase, trial.phase.value)


def setting_figure(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return "" if value is None else str(value)


def settings_words(trial: TrialResult) -> str:
    return ", ".join(
        f"{name.rpartition('.')[2]} {setting_figure(value)}" for name, value in trial.params.items()
    )


LEADERS = 5


def leaders(study: Study) -> list[TrialResult]:
    sign = 1 if study.mode == "min" else -1
    valued = [each for each in study.trials if each.value is not None and each.status != "failed"]
    return sorted(valued, key=lambda each: sign * (each.value or 0.0))


def final_table(study: Study, most: int = 12) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("", "trial", "settings", "step", study.metric, "status"):
        table.add_column(title, overflow="fold")
    for place, each in enumerate(leaders(study)[:most], 1):
        step = f"{each.step}/{each.total_steps}"
        cells = (settings_words(each), step, loss_figure(each.value), each.rule or each.status)
        table.add_row(str(place), each.name, *cells)
    return table


def saved_words(study: Study) -> str:
    words = f"early exit saved {study.saved_by_exit:.0%}"
    others = study.saved_fraction - study.saved_by_exit
    if others < 0.005:
        return words
    return f"{words}, and {others:.0%} was left by trials that failed or were stopped"


def first_reason(study: Study) -> str:
    told = [f"; {each.name}: {each.reason}" for each in study.trials if each.reason]
    return told[0] if told else ""


def closing_lines(study: Study, most: int = LEADERS) -> list[str]:
    """Who won, what was saved, where everything is."""
    lines = [
        f"{place}. {each.name}: {study.metric} {each.value:.4f}, {settings_words(each)} "
        f"({each.rule or each.status} at {each.step}/{each.total_steps})"
        for place, each in enumerate(leaders(study)[:most], 1)
    ]
    counts = Counter(each.status for each in study.trials)
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    trials = number_of(len(study.trials), "trial")
    lines.append(f"{trials} in {duration_figure(study.wall_s)}: {told}")
    # What was not trained yet was not saved.
    saved = "" if study.interrupted else f": {saved_words(study)}"
    lines.append(f"{study.tokens_spent:,} tokens trained of {study.tokens_full:,}{saved}")
    if study.fusion is not None:
        gain = study.fusion.together_rate / study.fusion.alone_rate
        lines.append(
            f"fusion: {rate_figure(study.fusion.together_rate)} tokens/s together, "
            f"{rate_figure(study.fusion.alone_rate)} one at a time, {gain:.1f} times as fast"
        )
    if study.winner is not None and study.best is not None:
        lines += [
            f"winner:  {study.winner.adapter}",
            f"alone:   {study.winner.command}",
        ]
    elif study.best is not None and not study.interrupted:
        lines.append(f"{study.best.name} is the best, but it has no adapter that can be used")
    elif study.best is None and not study.interrupted:
        lines.append(f"no winner: no trial came to a value{first_reason(study)}")
    lines.append(f"report:  {study.output / 'report.html'}")
    return lines
