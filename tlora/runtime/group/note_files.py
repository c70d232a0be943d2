"""What ranks say to the one that leads where nobody else carries it: a file for each, beside the
run's own, read as it grows."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tlora.core.records import of_json
from tlora.runtime.directory import RunDirectory, replace_text
from tlora.runtime.executors.messages import MESSAGES, Message, Noted
from tlora.runtime.executors.notes import event_of
from tlora.runtime.progress import USAGE
from tlora.runtime.run_log import read_lines


class Notes:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._read: dict[Path, int] = {}
        """Bytes of each file that were read."""

    def path(self, rank: int) -> Path:
        return self._root / f".notes-{rank}.jsonl"

    def read(self) -> Iterator[tuple[int, Message]]:
        """Whole lines that have come since the last time; not one that a crash or a full disk cut
        short."""
        for path in sorted(self._root.glob(".notes-*.jsonl")):
            rank = int(path.stem.removeprefix(".notes-"))
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                try:
                    fields = json.loads(line)
                except ValueError:
                    continue
                yield rank, of_json(MESSAGES, fields)

    def keep_left(self, directory: RunDirectory) -> None:
        """Events of ranks that ended before they were gathered."""
        for rank, message in self.read():
            if isinstance(message, Noted) and message.what != USAGE:
                record = event_of(rank, message.what, message.time, message.fields)
                directory.append(directory.root / "events.jsonl", record)
        self.remove()

    def remove(self) -> None:
        for path in self._root.glob(".notes-*.jsonl"):
            path.unlink()
        self._read.clear()


def sort_events(directory: RunDirectory) -> None:
    """Those of other ranks were gathered at the end."""
    path = directory.root / "events.jsonl"
    directory.close_file(path)
    records = sorted(read_lines(path), key=lambda record: record["time"])
    # As with all events, no job depends on it.
    with suppress(OSError):
        replace_text(path, "".join(f"{json.dumps(record)}\n" for record in records))
