"""`tlora profile`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from tlora.cli.bench import print_figures, with_progress
from tlora.cli.output import print_lines
from tlora.runtime.profiling.settings import HELP, REPEATS, SECONDS, Settings


def profile(
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help=HELP["output"])],
    shape: Annotated[str | None, typer.Option(metavar="SHAPE", help=HELP["shape"])] = None,
    seconds: Annotated[float, typer.Option(help=HELP["seconds"])] = SECONDS,
    repeats: Annotated[int, typer.Option(help=HELP["repeats"])] = REPEATS,
    tokens: Annotated[int | None, typer.Option(help=HELP["tokens"])] = None,
    device: Annotated[str, typer.Option(help=HELP["device"])] = "auto",
    threads: Annotated[int | None, typer.Option(help=HELP["threads"])] = None,
    dtype: Annotated[str, typer.Option(help=HELP["dtype"])] = "auto",
) -> None:
    """Measure this device for the cost model: nano-batches of many shapes, and a fit to them."""
    settings = Settings(
        output=output,
        shape=shape,
        seconds=seconds,
        repeats=repeats,
        tokens=tokens,
        device=device,
        threads=threads,
        dtype=dtype,
    )
    # torch loads with these.
    from tlora.costs.profile import write_profile
    from tlora.runtime.profiling import table
    from tlora.runtime.profiling.profiling import run_profile

    command = shlex.join(["tlora", *sys.argv[1:]])
    found = with_progress(lambda say: run_profile(settings, command, say))
    write_profile(found, output.expanduser())
    print_lines([*table.title(found), ""])
    print_figures(table.parameters(found))
    print_lines([""])
    print_figures(table.heldout(found))
    print_lines(["", *table.sentences(found), "", f"The profile is in {output}."])
