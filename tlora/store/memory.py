"""A store that ends with the process."""

from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class MemoryStore(Generic[T]):
    def __init__(self) -> None:
        self._turns: list[T] = []

    def record(self, turn: T) -> None:
        self._turns.append(turn)

    def turns(self) -> Iterable[T]:
        return iter(self._turns)
