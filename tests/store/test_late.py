"""Turns that the disk does not take at once."""

import sqlite3

from tlora.store.late import LateStore


class Disk:
    full = False

    def __init__(self) -> None:
        self.written: list[int] = []
        self.closed = False

    def record(self, turn: int) -> None:
        if self.full:
            raise sqlite3.OperationalError("database or disk is full")
        self.written.append(turn)

    def turns(self) -> list[int]:
        return self.written

    def close(self) -> None:
        self.closed = True


def test_turns_wait_for_room_and_are_written_in_order() -> None:
    """It is said once for each time that the disk is full."""
    disk, said = Disk(), list[str]()
    store = LateStore(disk, said.append)
    store.record(0)
    for first in (1, 4):
        disk.full = True
        store.record(first)
        store.record(first + 1)
        assert disk.written == list(range(first))
        assert store.turns() == list(range(first + 2))
        disk.full = False
        store.record(first + 2)
    assert disk.written == list(range(7))
    assert said == ["database or disk is full"] * 2


def test_what_waits_at_the_end_is_written_if_there_is_room_by_then() -> None:
    """A disk that is still full does not fail the run."""
    for full in (False, True):
        disk = Disk()
        said: list[str] = []
        store = LateStore(disk, said.append)
        disk.full = True
        store.record(0)
        disk.full = full
        store.close()
        assert len(said) == 1
        assert disk.closed and disk.written == ([] if full else [0])
