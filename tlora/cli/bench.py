"""`tlora bench`."""

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tlora.cli.output import print_lines
from tlora.runtime.benchmark.settings import HELP, Settings, settings_of

if TYPE_CHECKING:
    from tlora.runtime.benchmark import table

DEFAULTS = Settings()
T = TypeVar("T")
CLEARED = "\r\x1b[2K"
"""To the start of a terminal's line, with nothing on it."""


def several(name: str, metavar: str, default: tuple[object, ...]) -> Any:
    """An option with a list, said at once with commas or in parts."""
    return typer.Option(metavar=metavar, help=HELP[name], show_default=",".join(map(str, default)))


def bench(
    shape: Annotated[str | None, typer.Option(metavar="SHAPE", help=HELP["shape"])] = None,
    jobs: Annotated[int, typer.Option(help=HELP["jobs"])] = DEFAULTS.jobs,
    ranks: Annotated[list[str] | None, several("ranks", "R,..", DEFAULTS.ranks)] = None,
    batch: Annotated[list[str] | None, several("batch", "B,..", DEFAULTS.batch)] = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="N|FILE", help=HELP["lengths"])
    ] = DEFAULTS.lengths,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help=HELP["json"])
    ] = DEFAULTS.json,
    steps: Annotated[int | None, typer.Option(help=HELP["steps"])] = DEFAULTS.steps,
    repeats: Annotated[int, typer.Option(help=HELP["repeats"])] = DEFAULTS.repeats,
    dropout: Annotated[float, typer.Option(help=HELP["dropout"])] = DEFAULTS.dropout,
    budget: Annotated[int | None, typer.Option(help=HELP["budget"])] = DEFAULTS.budget,
    device: Annotated[str, typer.Option(help=HELP["device"])] = DEFAULTS.device,
    threads: Annotated[int | None, typer.Option(help=HELP["threads"])] = DEFAULTS.threads,
    dtype: Annotated[str, typer.Option(help=HELP["dtype"])] = DEFAULTS.dtype,
    quantization: Annotated[
        str, typer.Option(metavar="none|fp8|nf4", help=HELP["quantization"])
    ] = DEFAULTS.quantization,
    arms: Annotated[list[str] | None, several("arms", "ARM,..", DEFAULTS.arms)] = None,
    seconds: Annotated[int | None, typer.Option(help=HELP["seconds"])] = DEFAULTS.seconds,
    skip_peft: Annotated[bool, typer.Option("--skip-peft", help=HELP["skip_peft"])] = False,
    skip_compile: Annotated[
        bool, typer.Option("--skip-compile", help=HELP["skip_compile"])
    ] = False,
    compile_seconds: Annotated[
        int, typer.Option(help=HELP["compile_seconds"])
    ] = DEFAULTS.compile_seconds,
) -> None:
    """Measure this machine: jobs fused, one at a time, with PEFT, and the frozen backbone."""
    started = time.monotonic()
    settings = settings_of(
        {
            "shape": shape,
            "jobs": jobs,
            "ranks": ranks,
            "batch": batch,
            "lengths": lengths,
            "json": json,
            "steps": steps,
            "repeats": repeats,
            "dropout": dropout,
            "budget": budget,
            "device": device,
            "threads": threads,
            "dtype": dtype,
            "quantization": quantization,
            "arms": arms,
            "seconds": seconds,
            "skip_peft": skip_peft,
            "skip_compile": skip_compile,
            "compile_seconds": compile_seconds,
        }
    )
    # torch loads with these.
    from tlora.runtime.benchmark import record, table
    from tlora.runtime.benchmark.bench import run_benchmark

    record.check_writable(settings.json)
    result = with_progress(lambda say: run_benchmark(settings, say, started=started))
    print_lines([*table.title(result), ""])
    print_figures(table.rates(result))
    print_lines(["", *table.sentences(result), ""])
    if result.linears:
        print_figures(table.linears(result))
    line = record.as_line(record.record(result, shlex.join(["tlora", *sys.argv[1:]])))
    if settings.json is None:
        print_lines(["", line])
    else:
        record.append(line + "\n", settings.json)
        print_lines(["", f"One line was added to {settings.json}."])


def with_progress(run: Callable[[Callable[[str], None]], T]) -> T:
    """What is under way, on standard error: one line that changes on a terminal, else one each.
    Nothing spins: a thread that draws would take part in what is measured."""
    if not sys.stderr.isatty():
        return run(lambda text: print(text, file=sys.stderr, flush=True))
    try:
        return run(lambda text: print(f"{CLEARED}{text}", end="", file=sys.stderr, flush=True))
    finally:
        print(CLEARED, end="", file=sys.stderr, flush=True)


def print_figures(figures: "table.Table") -> None:
    """Numbers to the right."""
    console = Console()
    if not console.is_terminal:
        print_lines(figures.lines())
        return
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for place, name in enumerate(figures.header):
        shown.add_column(name, justify="right" if place else "left")
    for place, row in enumerate(figures.rows):
        shown.add_row(*(Text(cell) for cell in row), style="" if place else "bold")
    console.print(shown)
