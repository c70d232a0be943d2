"""Tokenised rows on disk: flat files of numbers, read through memory maps, shared by all jobs of
one key.

Rows are kept whole, so jobs with other lengths, seeds and splits use the same copy. A cache is
written into a directory of its own and renamed into place when it is complete: a reader sees all of
it or nothing, and of two writers the second to finish discards its copy. No file is ever changed
after that.

    tokens.bin    int32   all rows after one another
    trained.bin   uint8   1 where a token is trained on
    labels.bin    int32   in place of trained.bin, for rows that came with labels of their own
    offsets.npy   int64   where each row starts, and the end of the last
    targets.npy   int32   tokens of each row that carry loss
    files.npy     int32   the source of each row, by its place among the sources
    lines.npy     int64   the line or row number of each row
    empty.npy     int64   rows that have an empty answer
    meta.json             counts and words for people, written last
"""

import json
import os
import secrets
import shutil
import time
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tlora.core.sequence import IGNORED, TokenSequence
from tlora.data.lengths import window_starts
from tlora.data.tokenise import Encoded

ABANDONED_SECONDS = 24 * 3600
"""A half-written directory in which nothing changed for so long has no writer any more."""

STRETCH = 4 << 20
"""Tokens that are looked at together."""

DRAFT_MARK = ".draft-"
INT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMeta:
    """What meta.json holds."""

    num_rows: int
    num_tokens: int
    own_labels: bool
    """Whether labels are stored as such, because the rows brought their own."""

    pairs: bool = False
    """Whether two rows in a row are one preference pair, the chosen one first."""

    detected: str
    """The shape of the rows, in words."""

    rendering: str
    """How they became text, in words."""

    num_empty: int
    """Rows that have an empty answer. A cache that does not say is made again."""


class TokenCache:
    """Complete rows of one key, opened for reading."""

    def __init__(self, directory: Path, meta: CacheMeta, source_names: tuple[str, ...]) -> None:
        """`source_names` are this job's names for the sources, in the order they were read."""
        self.meta = meta
        self.key = directory.name
        """Of its contents: other rows, tokens or marks have another."""

        self._sources = source_names
        self._tokens = np.memmap(directory / "tokens.bin", dtype=np.int32, mode="r")
        if meta.own_labels:
            self._marks = np.memmap(directory / "labels.bin", dtype=np.int32, mode="r")
        else:
            self._marks = np.memmap(directory / "trained.bin", dtype=np.uint8, mode="r")
        self._offsets = np.load(directory / "offsets.npy", mmap_mode="r")
        self._files = np.load(directory / "files.npy", mmap_mode="r")
        self._lines = np.load(directory / "lines.npy", mmap_mode="r")
        self._empty = np.load(directory / "empty.npy", mmap_mode="r")
        self.targets: np.ndarray = np.load(directory / "targets.npy", mmap_mode="r")
        self.lengths: np.ndarray = np.diff(self._offsets)

    def __len__(self) -> int:
        return self.meta.num_rows

    @property
    def num_units(self) -> int:
        """Rows of the data: a pair is one, and two rows here."""
        return len(self) // 2 if self.meta.pairs else len(self)

    def empty_units(self) -> np.ndarray:
        """Those of which an answer is empty, in order."""
        return np.unique(self._empty // 2) if self.meta.pairs else self._empty

    def row(self, index: int) -> TokenSequence:
        """The whole row, however long."""
        return self.window(index, 0, int(self.lengths[index]))

    def window(self, index: int, start: int, length: int) -> TokenSequence:
        """`length` tokens of a row from `start` on."""
        first = int(self._offsets[index]) + start
        input_ids = np.array(self._tokens[first : first + length])
        labels = self._labels(first, length, input_ids)
        return TokenSequence(input_ids, labels, self.origin(index))

    def targets_within(self, rows: np.ndarray, max_length: int) -> np.ndarray:
        """Tokens of each of these rows that carry loss when it is cut to so many, int64. All of
        them are longer than that; they are read together, not one by one."""
        found = np.zeros(len(rows), dtype=np.int64)
        order = np.argsort(rows)
        ends = self._offsets[rows[order] + 1]
        first = 0
        while first < len(rows):
            # As many as lie in a stretch, and one at least.
            end = int(self._offsets[rows[order[first]]]) + STRETCH
            last = max(first + 1, int(np.searchsorted(ends, end, side="right")))
            together = order[first:last]
            found[together] = self._targets_of(rows[together], max_length)
            first = last
        return found

    def _targets_of(self, rows: np.ndarray, max_length: int) -> np.ndarray:
        begin = int(self._offsets[rows[0]])
        starts = self._offsets[rows] - begin
        ends = self._offsets[rows + 1] - begin
        marks = self._marks[begin : begin + int(ends[-1])]
        trained = marks != (IGNORED if self.meta.own_labels else 0)
        # Nothing predicts the first token of a row.
        trained[starts] = False
        before = np.concatenate([[0], np.cumsum(trained)])
        places = np.flatnonzero(trained)
        firsts = places[before[starts]] - starts
        lasts = places[before[ends] - 1] - starts
        begins = starts + window_starts(firsts, lasts, ends - starts, max_length)
        return before[begins + max_length] - before[begins + 1]

    def origin(self, index: int) -> str:
        return f"{self._sources[int(self._files[index])]}:{int(self._lines[index])}"

    def unit_origin(self, unit: int) -> str:
        return self.origin(2 * unit if self.meta.pairs else unit)

    def _labels(self, first: int, length: int, input_ids: np.ndarray) -> np.ndarray:
        marks = self._marks[first : first + length]
        if self.meta.own_labels:
            return np.array(marks)
        return np.where(marks.astype(bool), input_ids, np.int32(IGNORED))


class CacheWriter:
    """Writes the rows of one key into a draft directory; `publish` makes them the cache.

    Use it with `with`: a draft that was not published is removed.
    """

    def __init__(self, target: Path, *, own_labels: bool, source_names: tuple[str, ...]) -> None:
        self._target = target
        self._own_labels = own_labels
        self._file_index = {name: index for index, name in enumerate(source_names)}
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned_drafts(target.parent)
        self._draft = target.with_name(
            f"{target.name}{DRAFT_MARK}{os.getpid()}-{secrets.token_hex(4)}"
        )
        self._draft.mkdir()
        self._tokens = open(self._draft / "tokens.bin", "wb")  # noqa: SIM115  closed by __exit__
        marks = "labels.bin" if own_labels else "trained.bin"
        self._marks = open(self._draft / marks, "wb")  # noqa: SIM115
        self._offsets = array("q", [0])
        self._targets, self._files, self._lines = array("i"), array("i"), array("q")
        self._empty = array("q")

    def __enter__(self) -> "CacheWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._tokens.close()
        self._marks.close()
        shutil.rmtree(self._draft, ignore_errors=True)

    def __len__(self) -> int:
        return len(self._targets)

    def add(self, row: Encoded) -> None:
        if row.empty_answer:
            self._empty.append(len(self))
        trained = row.labels != IGNORED
        self._tokens.write(row.input_ids.astype(np.int32).tobytes())
        marks = row.labels.astype(np.int32) if self._own_labels else trained.astype(np.uint8)
        self._marks.write(marks.tobytes())
        self._offsets.append(self._offsets[-1] + len(row.input_ids))
        self._targets.append(int(trained[1:].sum()))
        self._files.append(self._file_index[row.origin.path])
        self._lines.append(row.origin.line)

    def publish(self, *, detected: str, rendering: str, pairs: bool = False) -> None:
        """Puts the rows in place, unless another writer was first."""
        self._tokens.close()
        self._marks.close()
        np.save(self._draft / "offsets.npy", np.array(self._offsets, dtype=np.int64))
        np.save(self._draft / "targets.npy", np.array(self._targets, dtype=np.int32))
        np.save(self._draft / "files.npy", np.array(self._files, dtype=np.int32))
        np.save(self._draft / "lines.npy", np.array(self._lines, dtype=np.int64))
        np.save(self._draft / "empty.npy", np.array(self._empty, dtype=np.int64))
        meta = CacheMeta(
            num_rows=len(self),
            num_tokens=self._offsets[-1],
            own_labels=self._own_labels,
            pairs=pairs,
            detected=detected,
            rendering=rendering,
            num_empty=len(self._empty),
        )
        (self._draft / "meta.json").write_text(json.dumps(asdict(meta), indent=1))
        if self._target.exists() and read_meta(self._target) is None:
            _set_aside(self._target)
        try:
            self._draft.rename(self._target)
        except OSError:
            if read_meta(self._target) is None:
                raise


def open_cache(target: Path, source_names: tuple[str, ...]) -> TokenCache | None:
    """The complete cache at this place, or None."""
    meta = read_meta(target)
    return TokenCache(target, meta, source_names) if meta else None


def read_meta(target: Path) -> CacheMeta | None:
    """None unless the cache is there and its files are as long as they should be."""
    try:
        meta = CacheMeta(**json.loads((target / "meta.json").read_text()))
        marks = ("labels.bin", INT32_BYTES) if meta.own_labels else ("trained.bin", 1)
        whole = all(
            (target / name).stat().st_size == meta.num_tokens * item_bytes
            for name, item_bytes in (("tokens.bin", INT32_BYTES), marks)
        )
    except (OSError, ValueError, TypeError):
        return None
    return meta if whole else None


def remove_abandoned_drafts(
    directory: Path, *, older_than_seconds: float = ABANDONED_SECONDS
) -> None:
    """Clears what crashed writers left behind."""
    for draft in directory.glob(f"*{DRAFT_MARK}*"):
        try:
            changed = max(path.stat().st_mtime for path in (draft, *draft.iterdir()))
        except OSError:
            continue  # its writer is just removing it
        if time.time() - changed > older_than_seconds:
            shutil.rmtree(draft, ignore_errors=True)


def _set_aside(damaged: Path) -> None:
    """Moves a damaged cache out of the way; another writer may do the same at this moment."""
    aside = damaged.with_name(f"{damaged.name}{DRAFT_MARK}damaged-{secrets.token_hex(4)}")
    try:
        damaged.rename(aside)
    except OSError:
        return
    shutil.rmtree(aside, ignore_errors=True)
