"""`tlora schema`."""

from typing import Annotated

import typer


def schema(
    sweep: Annotated[bool, typer.Option("--sweep", help="Of a sweep file instead.")] = False,
) -> None:
    """Print the JSON schema of a job file, for editors."""
    import json

    # pydantic loads with this, and the help should not wait for it.
    from tlora.config import json_schema, sweep_schema

    typer.echo(json.dumps(sweep_schema() if sweep else json_schema(), indent=2))
