"""Arguments that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

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

BaseModel = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="MODEL",
        help="Model id or directory.",
        show_default="what the adapter names",
    ),
]
