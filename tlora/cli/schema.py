"""`tlora schema`."""

import typer


def schema() -> None:
    """Print the JSON schema of a job file, for editors."""
    import json

    # pydantic loads with this, and the help should not wait for it.
    from tlora.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
