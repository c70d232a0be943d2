"""Arguments that several verbs share."""

import os
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from tlora.core.errors import AdapterError, SpecError

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


def named_directory(name: str | Path) -> Path:
    """An empty word, as of a variable that is not set, would be the directory that one is in. A
    default comes here as it is."""
    if not str(name).strip():
        raise typer.BadParameter("names no directory")
    return Path(name)


STARTED_OVER = ("fresh", "yes")
"""Options that are not said again: nothing is started over."""

ON_RECORD = ("file", "output", "override", "isolation", *STARTED_OVER)
"""Of tlora train, those that the directory of a run has: its resolved.yaml, or its own name."""


def command_again(context: typer.Context) -> str:
    """The command line that goes on with what this one began: the same, but nothing is started
    over."""
    return shlex.join(["tlora", context.info_name or "", *said(context, but=STARTED_OVER)])


def said(context: typer.Context, *, but: Collection[str]) -> list[str]:
    """Arguments and options of the command line, all but these."""
    words: list[str] = []
    for parameter in context.command.params:
        name, value = parameter.name or "", context.params.get(parameter.name or "")
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name in but:
            continue
        if parameter.param_type_name == "argument":
            words.append(str(value))
        elif value is True:
            words.append(parameter.opts[0])
        else:
            each = value if isinstance(value, (list, tuple)) else [value]
            words += [word for item in each for word in (parameter.opts[0], str(item))]
    return words


def check_place(option: str, path: Path | None) -> None:
    """Of a file that is written in the end: said before the work, not after it."""
    if path is None:
        return
    place = path.expanduser()
    if place.is_dir():
        raise SpecError(f"{path} is a directory; name a file", field=option)
    if not place.absolute().parent.is_dir():
        raise SpecError(f"there is no directory {path.parent}", field=option)
    if not os.access(place if place.exists() else place.absolute().parent, os.W_OK):
        raise SpecError(f"{path} cannot be written; name another file", field=option)


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
