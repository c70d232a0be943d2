"""A row as it was read, and the place it came from.

Every message about data names that place, so it travels with the row from the file to the token
sequence.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tlora.core.errors import DataError


class Origin(NamedTuple):
    """`line` is the line where JSON lines and CSV rows start, and the row's number, from 1,
    elsewhere."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"

    def error(self, message: str) -> DataError:
        return DataError(message, path=self.path, line=self.line)


@dataclass(frozen=True, slots=True)
class Row:
    """One object of a dataset, before anything was made of its keys."""

    values: dict[str, object]
    origin: Origin
