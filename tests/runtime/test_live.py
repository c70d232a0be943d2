"""The live view: what is on the screen at every size, and what is left at the end."""

import io
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console
from support.waiting import until

from tlora.runtime.directory import JobResult
from tlora.runtime.live import LiveProgress, Screen, choose_progress, tokens_left
from tlora.runtime.live_table import JobRow, RankRow, Totals, draw
from tlora.runtime.pace import FALLING, LEVEL, RISING, Pace, Trend
from tlora.runtime.progress import ProgressLines, RankUsage
from tlora.training.compose import Kind
from tlora.training.driver import Status
from tlora.training.outcome import Outcome, StepDone

TOTALS = Totals(tokens_per_s=12_345.0, fill=0.93, seconds=83, seconds_left=250, stopping=False)


def trend_of(*values: float) -> Trend:
    trend = Trend()
    for value in values:
        trend.add(value)
    return trend


def row(name: str, status: str = "training", *, step: int = 120, total: int = 300) -> JobRow:
    trend = trend_of(*(5 - at / 10 for at in range(30)))
    return JobRow(name, status, step, total, 2.345, trend, 2.5, 1_234.0, 61)


def screen(rows: list[JobRow], *, width: int, height: int, totals: Totals = TOTALS) -> list[str]:
    """The text on the screen, through rich."""
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    console.print(Screen(draw(rows, totals, width=width, height=height)))
    return console.file.getvalue().rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("jobs", [1, 7, 40])
def test_no_line_is_wider_than_the_terminal(width: int, jobs: int) -> None:
    """However long the names."""
    rows = [row(f"job-{at}-{'x' * at}", total=10 ** (at % 6 + 2)) for at in range(jobs)]
    lines = screen(rows, width=width, height=24)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24


def test_at_80_columns_everything_but_the_curve_is_there() -> None:
    """Name, bar, steps, loss with its direction, held-out loss, rate, time left, status."""
    title, line = screen([row("spider-text-to-sql")], width=80, height=24)[:2]
    assert " ".join(title.split()) == "job progress step loss held-out tok/s left status"
    assert line.split()[0] == "spider-text-to-sql" and "━━·" in line
    assert line.split()[2:] == ["120/300", f"2.345{FALLING}", "2.500", "1,234", "1:01", "training"]


def test_a_wide_terminal_shows_the_curve_and_a_narrow_one_drops_columns() -> None:
    """What is dropped first matters least."""
    titles = {
        width: screen([row("a" * 20)], width=width, height=24)[0].split()
        for width in (120, 80, 60, 40)
    }
    assert "trend" in titles[120] and "trend" not in titles[80]
    assert "tok/s" not in titles[60] and "loss" in titles[40] and "job" in titles[40]
    assert len(titles[120]) > len(titles[80]) > len(titles[60]) > len(titles[40])


def test_forty_jobs_fit_24_rows_with_the_rest_counted() -> None:
    """Running ones are shown, a failed one too, finished ones give way."""
    rows = [row(f"job-{at:02}", "done" if at < 15 else "training") for at in range(40)]
    rows[3] = row("job-03", "failed")
    lines = screen(rows, width=80, height=24)
    assert len(lines) == 24
    shown = [line.split()[0] for line in lines if line.startswith("job-")]
    assert shown == ["job-03", *(f"job-{at}" for at in range(15, 33))]
    assert "+ 21 more: 7 running, 14 done (40% through, median loss 2.345)" in lines
    assert "failed" in next(line for line in lines if line.startswith("job-03"))


def test_jobs_that_had_their_turn_come_before_those_that_wait() -> None:
    """A hundred jobs do not all start at once; what is shown moves."""
    rows = [row(f"job-{at:02}", "training" if at % 5 == 0 else "waiting") for at in range(100)]
    lines = screen(rows, width=80, height=24)
    assert sum("training" in line for line in lines) == 19 and len(lines) == 24
    assert (
        "+ 81 more: 1 running, 80 waiting" in "\n".join(lines) and "tokens/s together" in lines[-1]
    )


def test_many_failures_leave_room_for_what_runs() -> None:
    """A quarter of the rows at most."""
    rows = [row(f"job-{at:02}", "failed" if at < 30 else "training") for at in range(60)]
    lines = screen(rows, width=80, height=24)
    shown = [line for line in lines if line.startswith("job-")]
    assert 1 <= sum("failed" in line for line in shown) <= len(shown) // 4 + 1
    assert sum("training" in line for line in shown) > len(shown) // 2


def test_the_footer_tells_of_the_group() -> None:
    """How far, how long, how many, how fast, how full."""
    rows = [row("a", step=50, total=100), row("b", "done", step=100, total=100), row("c", "failed")]
    text = "\n".join(screen(rows, width=80, height=24))
    assert "90%" in text and "1:23 gone, about 4:10 left" in text
    assert "1 running, 1 done, 1 failed | 12.3k tokens/s together, 93% full" in text


def test_a_first_ctrl_c_is_answered_in_the_view() -> None:
    """And the screen still holds it."""
    stopping = Totals(tokens_per_s=1, fill=None, seconds=1, seconds_left=None, stopping=True)
    rows = [row(f"job-{at}") for at in range(40)]
    lines = screen(rows, width=80, height=24, totals=stopping)
    assert len(lines) == 24 and "Ctrl-C again" in lines[-1]


def test_trends_point_where_the_loss_goes() -> None:
    """Also after so many losses that they were averaged; what is not finite is passed over."""
    falling = trend_of(*(1000 - at for at in range(1000)), float("nan"))
    assert len(falling.values) < 64
    assert falling.arrow() == FALLING and trend_of(*range(20)).arrow() == RISING
    assert trend_of(*[3.0, 3.01] * 20).arrow() == LEVEL and trend_of(1.0, 2.0).arrow() == " "
    assert falling.sparkline(8) == "█▇▆▅▄▃▂▁" and trend_of(1.0).sparkline(8) == ""


def test_the_pace_is_that_of_the_last_while() -> None:
    """A job that was slow for long and is fast now is fast."""
    name = ("tokens", "a")
    pace = Pace(0, {name: 0})
    for second in range(1, 101):
        pace.mark(second, lambda second=second: {name: second})
    assert pace.rate(name, 100, 100) == pytest.approx(1)
    for second in range(1, 41):
        pace.mark(100 + second, lambda second=second: {name: 100 + 10 * second})
    assert pace.rate(name, 140, 500) == pytest.approx(10, rel=0.05)
    assert Pace(0, {name: 5}).rate(name, 10, 5) == 0


@dataclass
class FakeDriver:
    name: str
    total_steps: int = 10
    step: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    tokens_seen: int = 0
    status: Status = field(default=Status.RUNNING)


def result_of(driver: FakeDriver, *, reason: str | None = None) -> JobResult:
    return JobResult(
        job=driver.name,
        status=driver.status.value,
        reason=reason,
        steps=driver.step,
        total_steps=driver.total_steps,
        loss=driver.loss,
        first_eval_loss=None,
        eval_loss=None,
        best_eval_loss=None,
        best_step=None,
        tokens_seen=driver.tokens_seen,
        sequences_seen=0,
        seconds=1.0,
        adapter=None if reason else f"{driver.name}/adapter",
        best_adapter=None,
        serving=[] if reason else [f"vllm serve base --lora-modules {driver.name}=x"],
    )


@pytest.fixture
def played(tmp_path: Path) -> tuple[str, str]:
    """A run of three jobs on a made-up terminal: while it goes on, and all of it."""
    out = io.StringIO()
    console = Console(
        file=out, width=80, height=24, force_terminal=True, color_system=None, legacy_windows=False
    )
    view = LiveProgress(console, every_seconds=0.01)
    drivers = [FakeDriver("good"), FakeDriver("bad"), FakeDriver("late")]
    view.start(drivers, 1024)  # type: ignore[arg-type]
    for step in range(1, 11):
        tokens = {driver.name: 100 for driver in drivers}
        view.on_nano_batch(Outcome(kind=Kind.TRAIN, rows=512, tokens=tokens))
        for driver in drivers:
            if (driver.name == "late" and step > 4) or driver.status is not Status.RUNNING:
                continue
            driver.step, driver.tokens_seen, driver.loss = step, 100 * step, 5 - step / 10
            done = StepDone(driver.name, step, driver.loss, 1.0, 1e-3, 90, 100, 1, 1)
            view.on_step(driver, done)  # type: ignore[arg-type]
        if step == 3:
            drivers[1].status = Status.FAILED
            view.on_end(result_of(drivers[1], reason="the loss is not finite"))
    view.on_interrupt()
    until(lambda: "Ctrl-C again" in out.getvalue())
    during = out.getvalue()
    drivers[0].status = Status.COMPLETED
    results = [result_of(drivers[1], reason="the loss is not finite"), result_of(drivers[0])]
    (tmp_path / "report.html").touch()
    view.close()
    view.finish(results, tmp_path)
    return during, out.getvalue()


def test_the_view_shows_a_run_as_it_goes(played: tuple[str, str]) -> None:
    """Every job, a failure with its reason above the table, and the answer to Ctrl-C."""
    during, _ = played
    assert "bad: failed after 3 steps: the loss is not finite" in during
    assert "good " in during and "10/10" in during and "4/10" in during
    assert "59% full" in during and "Ctrl-C again" in during


def test_a_job_that_joins_has_a_row_and_a_rate_of_its_own() -> None:
    """One that comes back takes the place of its earlier self, and is no faster for the steps that
    it made before."""
    view = LiveProgress(Console(width=100, height=24, file=io.StringIO()))
    old = FakeDriver("old")
    view.start([old], 1024)  # type: ignore[list-item]
    view.join(FakeDriver("new"))  # type: ignore[arg-type]
    view.on_nano_batch(Outcome(kind=Kind.TRAIN, rows=512, tokens={"old": 100, "new": 50}))
    old.status = Status.CANCELLED
    view.on_end(result_of(old))
    assert view._row(old, time.perf_counter()).status == "cancelled"  # type: ignore[arg-type]
    back = FakeDriver("old")
    back.step = 5
    view.join(back)  # type: ignore[arg-type]
    view.close()
    assert [driver.name for driver in view._drivers] == ["new", "old"]
    row = view._row(back, time.perf_counter())  # type: ignore[arg-type]
    assert (row.status, row.step, row.tokens_per_s, row.seconds_left) == ("training", 5, 0, None)


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.STOPPED_EARLY])
def test_a_job_is_done_when_its_end_is_told(status: Status) -> None:
    """Before that its files are being written; a failed one has none."""
    view = LiveProgress(Console(file=io.StringIO()))
    job, bad = FakeDriver("job"), FakeDriver("bad", status=Status.FAILED)
    view.start([job, bad], 1024)  # type: ignore[list-item]
    view.close()

    def shown(driver: FakeDriver) -> str:
        return view._row(driver, time.perf_counter()).status  # type: ignore[arg-type]

    assert (shown(job), shown(bad)) == ("waiting", "failed")
    job.status = status
    assert shown(job) == "saving"
    view.on_end(result_of(job))
    assert shown(job) == {Status.COMPLETED: "done"}.get(status, "stopped early")


def test_the_end_leaves_a_table_and_where_everything_is(
    played: tuple[str, str], tmp_path: Path
) -> None:
    """In the file's order; one job's commands, the report, and the cursor back."""
    _, text = played
    end = text[text.rindex("job   status") :]
    names = [line.split()[:2] for line in end.splitlines()[1:4]]
    assert names == [["good", "done"], ["bad", "failed"], ["late", "interrupted"]]
    assert "serve good: vllm serve" in end and str(tmp_path / "report.html") in end.replace(
        "\n", ""
    )
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"


def test_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for a terminal that can neither move its cursor nor write the signs."""

    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(choose_progress(io.StringIO()), ProgressLines)
    assert isinstance(choose_progress(Terminal(io.BytesIO(), "utf-8")), LiveProgress)
    assert isinstance(choose_progress(Terminal(io.BytesIO(), "ascii")), ProgressLines)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(choose_progress(Terminal(io.BytesIO(), "utf-8")), ProgressLines)


def usage(
    rank: int, seconds: float, tokens: int, jobs: tuple[str, ...] = ("a", "b"), ranks: int = 2
) -> RankUsage:
    return RankUsage(rank, ranks, jobs, 10, 1, tokens, seconds, seconds / 4)


def test_ranks_are_shown_with_their_jobs() -> None:
    """A job that spans ranks on each of them; the rate of the last while, and what time goes to."""
    view = LiveProgress(Console(width=100, height=30, file=io.StringIO()))
    view.start([], 128)
    view.on_rank(usage(1, 1.0, 0, jobs=("b",)))
    view.on_rank(usage(0, 1.0, 0))
    view.on_rank(usage(0, 3.0, 5000))
    lines = ["".join(text for text, _ in line) for line in view._draw().lines]
    at = lines.index("rank   tok/s  empty  comm.  jobs")
    assert lines[at + 1].split() == ["0", "2,500", "10%", "25%", "a,", "b"]
    assert lines[at + 2].split() == ["1", "0", "10%", "25%", "b"]
    # Another group, of fewer, which has trained for longer than the lost one had.
    view.on_rank(usage(0, 5.0, 100, ranks=1))
    lines = ["".join(text for text, _ in line) for line in view._draw().lines]
    view.close()
    at = lines.index("rank   tok/s  empty  comm.  jobs")
    assert lines[at + 1].split()[:2] == ["0", "20"] and lines[at + 2] == ""


@pytest.mark.parametrize("height", [4, 9, 12, 24])
def test_many_ranks_leave_room_for_the_jobs(height: int) -> None:
    """A third of the lines at most, those with the most empty turns among them; none on a screen
    too small for both."""
    ranks = [RankRow(at, ("a",) * 50, 10.0, at / 100, 0.5) for at in range(64)]
    found = draw([row("a")], TOTALS, width=80, height=height, ranks=ranks)
    lines = ["".join(text for text, _ in line) for line in found]
    assert len(lines) <= max(4, height) + 1 and max(map(len, lines)) <= 80
    shown = [line for line in lines if line[:4].strip().isdigit()]
    assert len(shown) <= height // 3
    assert height < 12 or (shown[-1].startswith("  63") and "more ranks" in "".join(lines))


def test_a_job_that_waits_after_it_began_is_taken_for_an_average_one() -> None:
    """Its step is known, and what its steps took is in its checkpoint."""
    trains = FakeDriver("trains", total_steps=10, step=5, tokens_seen=500)
    waits = FakeDriver("waits", total_steps=10, step=8, status=Status.WAITING)
    assert tokens_left([trains, waits]) == 5 * 100 + 2 * 100  # type: ignore[list-item]
    assert tokens_left([waits]) is None  # type: ignore[list-item]
