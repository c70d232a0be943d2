"""Which files a job's paths mean: files, globs, directories and Hugging Face dataset ids.

Only names are looked at here; `reading` opens what was found.
"""

import glob
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tlora.core.errors import DataError

Format = Literal["json", "jsonl", "csv", "parquet"]
Compression = Literal["gz", "zst"]

FORMATS: dict[str, Format] = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
}
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
KNOWN_ENDINGS = ", ".join(FORMATS) + ", each also with .gz or .zst"

HUB_ID = re.compile(r"(?P<dataset>[\w.-]+/[\w.-]+|[\w-]+)(?::(?P<split>[\w.\[\]%-]+))?")


@dataclass(frozen=True, slots=True)
class FileSource:
    """A local file whose name says how to read it."""

    path: Path
    format: Format
    compression: Compression | None = None

    @property
    def name(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class HubSource:
    """A dataset on the Hugging Face Hub."""

    dataset: str
    split: str = "train"

    @property
    def name(self) -> str:
        return f"{self.dataset}:{self.split}"


Source = FileSource | HubSource


def find_sources(paths: tuple[str, ...]) -> tuple[Source, ...]:
    """The sources that the paths name, in their order; a directory's or a glob's files are
    sorted."""
    if not paths:
        raise DataError("data.path names no file")
    try:
        return tuple(source for path in paths for source in _expand(path))
    except OSError as error:
        # A folder on the way that may not be looked into, a name that is too long.
        raise DataError(
            f"cannot be looked at: {error.strerror}", path=str(error.filename or ", ".join(paths))
        ) from error


def _expand(text: str) -> list[Source]:
    path = Path(text).expanduser()
    if path.is_dir():
        return _directory(path)
    if path.exists():
        return [_file(path)]
    if glob.has_magic(text):
        return _glob(text)
    hub = HUB_ID.fullmatch(text)
    if hub and _recognise(path) is None:
        return [HubSource(dataset=hub["dataset"], split=hub["split"] or "train")]
    raise DataError("no such file or directory", path=text)


def _directory(directory: Path) -> list[Source]:
    visible = [
        path
        for path in sorted(directory.rglob("*"))
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    ]
    found: list[Source] = [source for path in visible if (source := _recognise(path))]
    if not found:
        raise DataError(
            f"the directory holds no file ending in {KNOWN_ENDINGS}", path=str(directory)
        )
    return found


def _glob(pattern: str) -> list[Source]:
    matches = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
    files = [path for match in matches if (path := Path(match)).is_file()]
    if not files:
        raise DataError("no file matches this pattern", path=pattern)
    return [_file(path) for path in files]


def _file(path: Path) -> FileSource:
    source = _recognise(path)
    if source is None:
        raise DataError(
            f"cannot tell the format from the name; it should end in {KNOWN_ENDINGS}",
            path=str(path),
        )
    return source


def _recognise(path: Path) -> FileSource | None:
    compression = COMPRESSIONS.get(path.suffix.lower())
    inner = path.with_suffix("") if compression else path
    kind = FORMATS.get(inner.suffix.lower())
    return FileSource(path, kind, compression) if kind else None
