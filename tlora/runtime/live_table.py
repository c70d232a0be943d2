"""The live view as lines of text: which jobs are shown, in which columns, at this size of
terminal. It only draws; what it draws is handed in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from tlora.runtime.figures import duration_figure, loss_figure, rate_figure
from tlora.runtime.pace import Trend

RUNNING = ("waiting", "training", "evaluating", "saving")
TROUBLE = ("failed", "paused")
STYLES = {
    "waiting": "dim",
    "training": "",
    "evaluating": "cyan",
    "saving": "cyan",
    "done": "green",
    "stopped early": "green",
    "cancelled": "yellow",
    "paused": "bold yellow",
    "failed": "bold red",
}
Line = list[tuple[str, str]]
"""Pieces of text, each with rich's name of its style. Plain pieces rather than rich's own text: it
would wrap and measure them, at three times the cost."""

NARROWED = ("trend", "progress", "job")
"""Columns that a narrow terminal makes narrower, the first one first."""

DROPPED = ("trend", "tok/s", "progress", "held-out", "left", "step", "status")
"""Columns that a very narrow terminal goes without, the first one first."""


@dataclass(frozen=True, slots=True)
class JobRow:
    name: str
    status: str
    """A key of STYLES."""

    step: int
    total_steps: int
    loss: float | None
    trend: Trend
    eval_loss: float | None
    tokens_per_s: float
    seconds_left: float | None

    @property
    def running(self) -> bool:
        return self.status in RUNNING


@dataclass(frozen=True, slots=True)
class Totals:
    """The group as a whole."""

    tokens_per_s: float
    fill: float | None
    """Useful tokens over rows of all nano-batches."""

    seconds: float
    seconds_left: float | None
    stopping: bool
    """A person has asked to stop."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """A rank of a group."""

    rank: int
    jobs: Sequence[str]
    tokens_per_s: float
    empty: float
    """Of its turns, those without work."""

    communication: float
    """Of its time, in collectives and waiting for others in them."""


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    width: int
    least: int
    cell: Callable[[JobRow, int], str]
    """What to write into so many characters."""

    right: bool = True
    style: Callable[[JobRow], str] = lambda row: ""

    def fitted(self, text: str) -> str:
        if len(text) > self.width:
            text = text[: self.width - 1] + "…"
        return text.rjust(self.width) if self.right else text.ljust(self.width)


@dataclass(frozen=True, slots=True)
class Layout:
    columns: list[Column]
    gap: int

    def header(self) -> Line:
        cells = [column.fitted(column.title) for column in self.columns]
        return [((" " * self.gap).join(cells), "bold")]

    def line(self, row: JobRow) -> Line:
        line: Line = []
        plain = ""
        for column in self.columns:
            cell, style = column.fitted(column.cell(row, column.width)), column.style(row)
            if style:
                line += [(plain, ""), (cell, style)]
                plain = " " * self.gap
            else:
                plain += cell + " " * self.gap
        return [*line, (plain.rstrip(), "")]


def draw(
    rows: Sequence[JobRow],
    totals: Totals,
    *,
    width: int,
    height: int,
    ranks: Sequence[RankRow] = (),
) -> list[Line]:
    """At most `height` lines, four at least, of at most `width` characters. Ranks have a third of
    them at most."""
    foot = [*rank_lines(ranks, room=height // 3), *footer(rows, totals, width)]
    shown, hidden = choose(rows, room=max(1, height - 1 - len(foot)))
    layout = choose_layout(shown, width)
    lines = [layout.header(), *(layout.line(row) for row in shown)]
    if hidden:
        lines.append([(f"+ {len(hidden)} more: {counted(hidden)}{course(hidden)}", "dim")])
    return [cut(line, width) for line in [*lines, *foot]]


def rank_lines(ranks: Sequence[RankRow], room: int) -> list[Line]:
    """Who is on which rank, and what its time goes to: those with the most empty turns first where
    not all fit. Nothing where there are no ranks, or no room for two of them."""
    if not ranks or room < 4:
        return []
    room -= 2
    shown = list(ranks)
    if len(ranks) > room:
        fewest = sorted(ranks, key=lambda row: -row.empty)[: room - 1]
        shown = [row for row in ranks if row in fewest]
    lines: list[Line] = [[], [("rank   tok/s  empty  comm.  jobs", "bold")]]
    for row in shown:
        figures = f"{rate_figure(row.tokens_per_s):>6}  {row.empty:5.0%}  {row.communication:5.0%}"
        jobs = ", ".join(row.jobs) or "none"
        lines.append([(f"{row.rank:4}  {figures}  {jobs}", "")])
    if len(shown) < len(ranks):
        lines.append([(f"+ {len(ranks) - len(shown)} more ranks with fewer empty turns", "dim")])
    return lines


def cut(line: Line, width: int) -> Line:
    kept: Line = []
    for text, style in line:
        room = width - sum(len(piece) for piece, _ in kept)
        if len(text) > room:
            return [*kept, (text[: room - 1] + "…" if room else "", style)]
        kept.append((text, style))
    return kept


def choose(rows: Sequence[JobRow], room: int) -> tuple[list[JobRow], list[JobRow]]:
    """What is shown, in the order of the file, and what is not: where not all fit, jobs in trouble
    (a quarter of the room at most) come first, then those that run, before those that have not had
    a turn yet; and a line is left for the rest."""
    if len(rows) <= room:
        return list(rows), []
    room = max(0, room - 1)
    trouble = [row for row in rows if row.status in TROUBLE][: max(1, room // 4)]
    running = [row for row in rows if row.running and row.status != "waiting"]
    waiting = [row for row in rows if row.status == "waiting"]
    over = [row for row in rows if not row.running]
    ranked = dict.fromkeys(row.name for row in [*trouble, *running, *waiting, *over])
    chosen = set(list(ranked)[:room])
    return (
        [row for row in rows if row.name in chosen],
        [row for row in rows if row.name not in chosen],
    )


def choose_layout(rows: Sequence[JobRow], width: int) -> Layout:
    """As much as fits: first widths give way, then whole columns."""
    gap = 2 if width >= 90 else 1
    columns = {column.title: column for column in all_columns(rows)}

    def excess() -> int:
        return sum(each.width + gap for each in columns.values()) - gap - width

    for title in NARROWED:
        column = columns[title]
        cut = min(max(0, excess()), column.width - column.least)
        columns[title] = replace(column, width=column.width - cut)
    for title in DROPPED:
        if excess() > 0:
            del columns[title]
    for title in ("job", "progress"):
        if excess() > 0 and title in columns:
            column = columns[title]
            columns[title] = replace(column, width=max(1, column.width - excess()))
        elif excess() < 0 and title in columns:
            column, wanted = columns[title], all_columns(rows)
            most = next(each.width for each in wanted if each.title == title)
            columns[title] = replace(column, width=min(most, column.width - excess()))
    return Layout(list(columns.values()), gap)


def all_columns(rows: Sequence[JobRow]) -> list[Column]:
    """At their full widths, in the order of the screen."""
    longest = max((len(row.name) for row in rows), default=3)
    name = min(32, max(3, longest))
    steps = max((len(step_figure(row)) for row in rows), default=4)
    status = max((len(row.status) for row in rows), default=6)
    step = max(4, steps)
    return [
        Column("job", name, min(name, 14), lambda row, _: row.name, right=False),
        Column("progress", 20, 8, bar, right=False, style=bar_style),
        Column("step", step, step, lambda row, _: step_figure(row)),
        Column("loss", 8, 8, lambda row, _: f"{loss_figure(row.loss)}{row.trend.arrow()}"),
        Column("trend", 14, 8, lambda row, most: row.trend.sparkline(most), right=False),
        Column("held-out", 8, 8, lambda row, _: loss_figure(row.eval_loss)),
        Column("tok/s", 6, 6, lambda row, _: rate_figure(row.tokens_per_s) if row.running else ""),
        Column("left", 7, 7, lambda row, _: duration_figure(row.seconds_left)),
        Column(
            "status",
            max(6, status),
            6,
            lambda row, _: row.status,
            right=False,
            style=lambda row: STYLES[row.status],
        ),
    ]


def step_figure(row: JobRow) -> str:
    return f"{row.step}/{row.total_steps}"


def bar(row: JobRow, width: int) -> str:
    """Full only at the last step, so that nothing looks finished before it is."""
    done = width * row.step // max(1, row.total_steps)
    return "━" * done + "·" * (width - done)


def bar_style(row: JobRow) -> str:
    return "blue" if row.running else STYLES[row.status]


def counted(rows: Sequence[JobRow]) -> str:
    """How many run, wait for their turn, are done, and are in trouble."""
    waiting = sum(row.status == "waiting" for row in rows)
    running = sum(row.running for row in rows) - waiting
    trouble = {status: sum(row.status == status for row in rows) for status in TROUBLE}
    done = len(rows) - running - waiting - sum(trouble.values())
    counts = {"running": running, "waiting": waiting, "done": done}
    parts = [f"{count} {what}" for what, count in counts.items() if count]
    parts += [f"{count} {status}" for status, count in trouble.items() if count]
    return ", ".join(parts)


def course(rows: Sequence[JobRow]) -> str:
    """How far those that run are, taken together."""
    running = [row for row in rows if row.running]
    if not running:
        return ""
    share = sum(row.step for row in running) / max(1, sum(row.total_steps for row in running))
    losses = [row.loss for row in running if row.loss is not None]
    middle = f", median loss {loss_figure(median(losses))}" if losses else ""
    return f" ({share:.0%} through{middle})"


def footer(rows: Sequence[JobRow], totals: Totals, width: int) -> list[Line]:
    """The whole group: how far, how fast, how long."""
    steps = sum(row.step for row in rows if row.running)
    wanted = sum(row.total_steps for row in rows if row.running)
    over = [row for row in rows if not row.running]
    steps += sum(row.total_steps for row in over)
    wanted += sum(row.total_steps for row in over)
    share = steps / max(1, wanted)
    done = round(min(30, width // 4) * share)
    left = min(30, width // 4) - done
    fill = f", {totals.fill:.0%} full" if totals.fill is not None else ""
    times = f"{duration_figure(totals.seconds)} gone"
    if totals.seconds_left is not None:
        times += f", about {duration_figure(totals.seconds_left)} left"
    first = [("━" * done, "green"), ("·" * left, "dim"), (f" {share:4.0%}  ", "bold"), (times, "")]
    second = f"{counted(rows)} | {rate_figure(totals.tokens_per_s)} tokens/s together{fill}"
    lines: list[Line] = [[], first, [(second, "")]]
    if totals.stopping:
        message = "stopping after this nano-batch; press Ctrl-C again to leave at once"
        lines.append([(message, "bold yellow")])
    return lines
