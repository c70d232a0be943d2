"""Where the files of a job are: names are looked up beside the job file, then where we stand.

What is found becomes an absolute path, so that a run can be resumed from another directory; a
pattern becomes the files it matches. What is not found may still be a name on the Hub.
"""

import glob
import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import cast

from tlora.config.layers import Fault
from tlora.config.values import Tree
from tlora.core.assets import DEMO
from tlora.core.errors import SpecError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILE_SUFFIX = re.compile(r".*\.[A-Za-z][A-Za-z0-9]*")
PATTERN = re.compile(r"[*?\[]")

DEMO_NAME = "demo"
"""The base model that comes with tlora, unless a checkpoint of that name is there."""


def locate_job(values: Tree, folder: Path) -> tuple[Tree, list[Fault]]:
    """The settings of a job with its paths found, and what was not found."""
    located, faults = dict(values), list[Fault]()
    for field in ("data.path", "data.eval_path"):
        value = values.get(field)
        if isinstance(value, (str, tuple)):
            names = cast(str | tuple[str, ...], value)
            located[field], missing = locate_data(names, field, folder)
            faults += missing
    start = values.get("init_from")
    if isinstance(start, str):
        found = find(start, folder)
        located["init_from"] = found or start
        if found is None:
            faults.append(Fault("init_from", f"no such adapter directory: '{start}'"))
        elif not os.path.isdir(found):
            faults.append(Fault("init_from", f"must be an adapter directory: '{start}' is a file"))
    template = values.get("data.chat_template")
    if isinstance(template, str) and "{" not in template:
        found = find(template, folder)
        located["data.chat_template"] = found or template
        if found is None:
            faults.append(
                Fault("data.chat_template", f"neither a Jinja template nor a file: '{template}'")
            )
    return located, faults


def locate_model(model: str, folder: Path) -> tuple[str, list[Fault]]:
    """A local directory as an absolute path; anything else is left for the Hub."""
    found = find(model, folder)
    if model == DEMO_NAME and not is_checkpoint(found):
        return str(DEMO / "base"), []
    if found is not None and os.path.isdir(found):
        return found, []
    if found is not None and FILE_SUFFIX.fullmatch(model):
        return model, [Fault("base.model", f"'{model}' is a file; name the directory of a model")]
    if model.startswith(("./", "../", "/", "~")) or model.count("/") > 1:
        return model, [Fault("base.model", f"no such model directory: '{model}'")]
    return model, []


def find_model(name: str, option: str) -> str:
    """The same for a command-line option, looked up where we stand."""
    model, faults = locate_model(name, Path.cwd())
    for fault in faults:
        raise SpecError(fault.message, field=option)
    return model


def is_checkpoint(path: str | None) -> bool:
    return path is not None and os.path.isfile(os.path.join(path, "config.json"))


def locate_data(
    value: str | tuple[str, ...], field: str, folder: Path
) -> tuple[str | tuple[str, ...], list[Fault]]:
    names = (value,) if isinstance(value, str) else value
    if not names:
        return value, [Fault(field, "must name at least one file")]
    located: list[str] = []
    faults: list[Fault] = []
    for name in names:
        found = files_of(name, folder)
        located += found
        if not found:
            what = "no file matches" if PATTERN.search(name) else "no such file"
            guess = near_file(name, folder)
            faults.append(Fault(field, f"{what}: '{name}' (looked in {folder}){guess}"))
    return (located[0] if isinstance(value, str) and len(located) == 1 else tuple(located)), faults


def files_of(name: str, folder: Path) -> list[str]:
    """The files that a name stands for, the name itself if it may be on the Hub, or nothing."""
    found = find(name, folder)
    if found is not None:
        return [found]
    if PATTERN.search(name):
        for root in (folder, Path.cwd()):
            pattern = os.path.join(glob.escape(str(root)), os.path.expanduser(name))
            if matches := sorted(glob.glob(pattern, recursive=True)):
                return [os.path.abspath(match) for match in matches]
    return [name] if HUB_ID.fullmatch(name) and not FILE_SUFFIX.fullmatch(name) else []


def near_file(name: str, folder: Path) -> str:
    """A file beside where it was looked for that is nearly called so, as a question."""
    sought = folder / os.path.expanduser(name)
    try:
        names = [path.name for path in sought.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    close = get_close_matches(sought.name, names, n=1)
    return f"; did you mean '{os.path.join(os.path.dirname(name), close[0])}'?" if close else ""


def find(name: str, folder: Path) -> str | None:
    """The absolute path of an existing file or directory."""
    expanded = os.path.expanduser(name)
    for root in (folder, Path.cwd()):
        path = os.path.join(root, expanded)
        if name and os.path.exists(path):
            return os.path.abspath(path)
    return None
