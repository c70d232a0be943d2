"""What ranks note for the one that leads, read as it grows."""

from pathlib import Path

from tlora.core.records import as_json
from tlora.runtime.directory import RunDirectory
from tlora.runtime.executors.messages import Noted, Said
from tlora.runtime.group.note_files import Notes


def test_every_line_is_read_once_and_whole(tmp_path: Path) -> None:
    """In the order of ranks; a line that is not finished waits for its end, and one that never
    was is passed over."""
    notes, directory = Notes(tmp_path), RunDirectory(tmp_path)
    said, noted = Said(("hello",)), Noted("usage", 1.0, {"rank": 2})
    directory.append(notes.path(2), as_json(noted))
    directory.append(notes.path(1), as_json(said))
    assert list(notes.read()) == [(1, said), (2, noted)]
    assert list(notes.read()) == []
    directory.append(notes.path(1), as_json(noted))
    whole = notes.path(1).read_bytes()
    notes.path(1).write_bytes(whole[:-5])
    assert list(notes.read()) == []
    notes.path(1).write_bytes(whole)
    assert list(notes.read()) == [(1, noted)]
    # A disk was full in the middle of a line, and had room again.
    first, second = whole.splitlines(keepends=True)
    with notes.path(1).open("ab") as file:
        file.write(second[:-5] + first + first)
    assert list(notes.read()) == [(1, said)]
    notes.remove()
    assert list(tmp_path.iterdir()) == []
