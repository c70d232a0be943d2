"""`tlora verify`."""

from pathlib import Path
from typing import Annotated

import typer

from tlora.cli.output import print_lines


def verify(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A PEFT adapter directory.")],
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            help="Model id or directory.",
            show_default="what the adapter names",
        ),
    ] = None,
) -> None:
    """Load an adapter onto its base model: keys, shapes and logits."""
    # torch loads with this.
    from tlora.runtime.verifying import verify_adapter

    print_lines(verify_adapter(adapter, base))
