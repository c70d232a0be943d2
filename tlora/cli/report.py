"""`tlora report`."""

from pathlib import Path
from typing import Annotated

import typer

from tlora.cli.output import print_lines
from tlora.core.errors import SpecError

RunDirectory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The directory of a run: train's --output.")
]


def report(directory: RunDirectory) -> None:
    """Make report.html of a run or a sweep: finished, running or killed."""
    from tlora.runtime.report import write_report
    from tlora.runtime.sweeps.report import is_sweep, write_sweep_report

    try:
        path = (write_sweep_report if is_sweep(directory) else write_report)(directory)
    except OSError as error:
        reason = error.strerror or error
        raise SpecError(f"{directory}: the report cannot be written: {reason}") from error
    print_lines([str(path)])
