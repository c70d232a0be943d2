"""A store of turns whose disk may be full for a while. What it does not take is kept, and written
in order before the next turn; no job depends on it."""

import sqlite3
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class TurnStore(Protocol[T]):
    def record(self, turn: T) -> None: ...

    def turns(self) -> Iterable[T]: ...

    def close(self) -> None: ...


class LateStore(Generic[T]):
    def __init__(self, store: TurnStore[T], on_trouble: Callable[[str], None]) -> None:
        """`on_trouble` is told why, once for each time that turns begin to wait."""
        self._store = store
        self._on_trouble = on_trouble
        self._waiting: deque[T] = deque()
        self._told = False

    def record(self, turn: T) -> None:
        self._waiting.append(turn)
        self._write()

    def turns(self) -> Iterable[T]:
        return [*self._store.turns(), *self._waiting]

    def close(self) -> None:
        self._write()
        self._store.close()

    def _write(self) -> None:
        try:
            while self._waiting:
                self._store.record(self._waiting[0])
                self._waiting.popleft()
        except sqlite3.OperationalError as error:
            if not self._told:
                self._on_trouble(str(error))
            self._told = True
        else:
            self._told = False
