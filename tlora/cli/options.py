"""Arguments that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

from tlora.core.errors import AdapterError

CONFIG = "adapter_config.json"

JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="A job file, YAML or JSON.")]

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        "-o",
        metavar="K=V",
        help="Set a field: train.max_steps=5 in every job, jobs.NAME.lora.r=8 in one, "
        "defaults.train.lr=1e-3, base.model=..., engine.nano_batch_tokens=512. May be repeated.",
    ),
]

AdapterDirectory = Annotated[
    Path, typer.Argument(metavar="ADAPTER", help="A PEFT adapter directory.")
]


def check_adapter(directory: Path) -> None:
    """Refuses what is near an adapter, with the name of what was meant; what is damaged inside is
    told when it is read."""
    if directory.is_file():
        raise AdapterError(f"{directory}: is a file; name the directory of an adapter")
    if (directory / CONFIG).is_file():
        return
    inside = [folder.parent for folder in sorted(directory.glob(f"*/{CONFIG}"))]
    deeper = [folder.parent for folder in sorted(directory.glob(f"*/adapter/{CONFIG}"))]
    if inside or deeper:
        raise AdapterError(
            f"{directory}: not an adapter, but it holds some; did you mean {(inside + deeper)[0]}?"
        )


BaseModel = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="MODEL",
        help="Model id or directory.",
        show_default="what the adapter names",
    ),
]

ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="P",
        help="A profile's file, or the name of one that comes with tlora.",
        show_default="the one of this device and base",
    ),
]
PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy", metavar="NAME", help="Who decides who trains with whom: tlora, solo, ..."
    ),
]
