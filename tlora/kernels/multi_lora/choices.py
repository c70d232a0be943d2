"""The file in which a device's choices are kept: one per device, kernel sources, versions of torch
and of Triton, in `kernels` of tlora's cache directory. Another says what was seen to be right there
(proving.py).

Whoever writes replaces the whole file at once, so two processes do each other no harm but that one
may time again what the other has timed.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tlora.kernels.multi_lora.devices import Choice

logger = logging.getLogger(__name__)

Key = Mapping[str, str]
MOST = 64
"""Of warps, stages or programs: more was not written here."""


def source_hash() -> str:
    """Of the kernels and of what decides how they are launched."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def path_of(folder: Path, key: Key) -> Path:
    text = json.dumps(dict(key), sort_keys=True)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def read(folder: Path, key: Key) -> dict[str, Choice]:
    """What is known; nothing if there is no file or it is not one of ours."""
    path = path_of(folder, key)
    try:
        found = _read(path, key, "choices")
        return {str(name): _choice(values) for name, values in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s is not used: %s", path, error)
        return {}


def _read(path: Path, key: Key, field: str) -> Any:
    content = json.loads(path.read_text("utf-8"))
    if content["key"] != dict(key):
        raise ValueError("it is for another device or version")
    return content[field]


def _choice(values: Mapping[str, object]) -> Choice:
    choice = Choice(**values)  # pyright: ignore[reportArgumentType] - checked below
    numbers = asdict(choice)
    if not all(type(value) is int and 1 <= value <= MOST for value in numbers.values()):
        raise ValueError(f"{numbers} are no settings")
    if choice.warps not in (4, 8):
        raise ValueError(f"{choice.warps} warps may change bits")
    return choice


def can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".new"):
            return True
    except OSError as error:
        logger.warning("kernel settings cannot be kept in %s: %s", folder, error)
        return False


def write(folder: Path, key: Key, choices: Mapping[str, Choice]) -> None:
    """These and what the file has already, which stays as it is."""
    path = path_of(folder, key)
    together = {**choices, **read(folder, key)}
    content = {
        "key": dict(key),
        "choices": {name: asdict(choice) for name, choice in sorted(together.items())},
    }
    _replace(path, content)


def _replace(path: Path, content: Mapping[str, object]) -> None:
    handle, new = tempfile.mkstemp(dir=path.parent, suffix=".new")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(new, path)
    except BaseException:
        Path(new).unlink(missing_ok=True)
        raise


def read_proven(folder: Path, key: Key) -> frozenset[str]:
    """The names of what was seen to be right; nothing if there is no such file."""
    path = _proven_path(folder, key)
    try:
        found = _read(path, key, "proven")
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise ValueError("it holds no names")
        return frozenset(found)
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is not used: %s", path, error)
        return frozenset()


def write_proven(folder: Path, key: Key, name: str) -> None:
    """One more; where nothing can be written, it is seen again at the next start."""
    names = sorted(read_proven(folder, key) | {name})
    if can_write(folder):
        _replace(_proven_path(folder, key), {"key": dict(key), "proven": names})


def _proven_path(folder: Path, key: Key) -> Path:
    return path_of(folder, key).with_suffix(".proven.json")
