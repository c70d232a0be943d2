"""`tlora merge`."""

from pathlib import Path
from typing import Annotated

import typer

from tlora.cli.output import print_lines


def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A PEFT adapter directory.")],
    output: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Where the merged model goes.")
    ],
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
    """Fold an adapter into its base model: a plain checkpoint."""
    # torch loads with this.
    from tlora.runtime.merging import merge_adapter

    print_lines(merge_adapter(adapter, output, base))
