"""`tlora merge`."""

from pathlib import Path
from typing import Annotated

import typer

from tlora.cli.options import AdapterDirectory, BaseModel, check_adapter
from tlora.cli.output import print_lines


def merge(
    adapter: AdapterDirectory,
    output: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Where the merged model goes.")
    ],
    base: BaseModel = None,
) -> None:
    """Fold an adapter into its base model: a plain checkpoint."""
    from tlora.config.paths import find_model

    check_adapter(adapter)
    model = find_model(base, "--base") if base else None
    # torch loads with this.
    from tlora.runtime.merging import merge_adapter

    print_lines(merge_adapter(adapter, output, model))
