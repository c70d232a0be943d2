"""The verbs of the `tlora` command, and what each kind of error means to the shell.

Exit codes: 0 well, 1 some job failed, 2 bad input; 130, interrupted, is main.py's.
"""

import sys
import time
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated, NoReturn

import typer

import tlora
from tlora.cli import (
    asking,
    bench,
    check,
    demo,
    merge,
    plan,
    preview,
    profile,
    report,
    schema,
    simulate,
    train,
    tune,
    verify,
)
from tlora.cli.output import print_error
from tlora.core.errors import AdapterError, DataError, ModelError, SpecError, TloraError
from tlora.runtime.group.launched import SPOKEN_S, note_refusal, refused_before

REFUSED = 2
BAD_INPUT = (SpecError, DataError, ModelError, AdapterError)

app = typer.Typer(
    name="tlora",
    help="Train many LoRA adapters together on one frozen base model.",
    no_args_is_help=True,
    # A traceback is for us, not for show: plain text is easier to paste into a report.
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("train")(train.train)
app.command("tune")(tune.tune)
app.command("submit")(asking.submit)
app.command("status")(asking.status)
app.command("cancel")(asking.cancel)
app.command("resume")(asking.resume)
app.command("clone")(asking.clone)
app.command("check")(check.check)
app.command("preview")(preview.preview)
app.command("report")(report.report)
app.command("verify")(verify.verify)
app.command("merge")(merge.merge)
app.command("schema")(schema.schema)
app.command("plan")(plan.plan)
app.command("bench")(bench.bench)
app.command("profile")(profile.profile)
app.command("simulate")(simulate.simulate)


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tlora {tlora.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True),
    ] = False,
) -> None:
    """Train many LoRA adapters together on one frozen base model."""


def write_whatever_there_is() -> None:
    """Rows and paths hold characters that a terminal or a log may not: they are written as escapes
    there, as on standard error, and end no run."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def run(args: Sequence[str] | None = None) -> NoReturn:
    """Runs one command line and exits with its code; unexpected errors keep their traceback."""
    if refused_before():
        # It was said, and would be the same again.
        sys.exit(REFUSED)
    write_whatever_there_is()
    try:
        app(args=args, prog_name="tlora")
    except BAD_INPUT as error:
        if note_refusal():
            print_error(str(error))
        else:
            # A launcher ends all ranks with the first that leaves: who speaks must come to it.
            time.sleep(SPOKEN_S)
        sys.exit(REFUSED)
    except SystemExit as ended:
        # Of a wrong option, say, or of a rank that another one speaks for.
        if ended.code == REFUSED:
            note_refusal()
        raise
    except TloraError as error:
        print_error(str(error))
        sys.exit(1)
    sys.exit(0)
