"""The line of waiting jobs where only so many may be looked at: whose wait is longest against its
own size comes first.

A wait of an hour is nothing to a job of a week, and ruins one of a minute. Sizes are tokens left
for each GPU that the job brings, so nobody's speed has to be known. Jobs of one size class (a
factor of two) stand in order of their waits, so only the first of each class are compared. A wait
grows without end and a size does not: everybody becomes the first.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable
from math import frexp
from typing import NamedTuple


class Split(NamedTuple):
    inside: list[str]
    """The first of the line."""

    heads: list[str]
    """Of those after them the first of each class, the longest relative wait first."""


class _Place(NamedTuple):
    began: float
    """When it would have begun to wait had it waited at one stretch."""

    number: int
    """In order of arrival."""

    name: str
    size: float


class Line:
    def __init__(self) -> None:
        self._classes: dict[int, list[_Place]] = {}
        self._places: dict[str, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, name: str, *, began: float, number: int, size: float) -> None:
        assert name not in self._places, f"{name} waits already"
        place = self._places[name] = _Place(began, number, name, size)
        insort(self._classes.setdefault(frexp(size)[1], []), place)

    def remove(self, name: str) -> None:
        place = self._places.pop(name)
        key = frexp(place.size)[1]
        entries = self._classes[key]
        del entries[bisect_left(entries, place)]
        if not entries:
            del self._classes[key]

    def split(self, room: int, now: float) -> Split:
        """So many of them, and who would be next."""
        # Negative, because a heap gives the least; the number breaks ties.
        heap = [self._entry(key, 0, now) for key in self._classes]
        heapq.heapify(heap)
        inside: list[str] = []
        while heap and len(inside) < room:
            _, _, key, index = heap[0]
            entries = self._classes[key]
            inside.append(entries[index].name)
            if index + 1 < len(entries):
                heapq.heapreplace(heap, self._entry(key, index + 1, now))
            else:
                heapq.heappop(heap)
        return Split(inside, [self._classes[key][index].name for _, _, key, index in sorted(heap)])

    def by_wait(self, names: Iterable[str], now: float) -> list[str]:
        """The longest relative wait first. Small jobs overtake large ones as time goes on."""
        places = [self._places[name] for name in names]
        places.sort(key=lambda place: ((place.began - now) / place.size, place.number))
        return [place.name for place in places]

    def _entry(self, key: int, index: int, now: float) -> tuple[float, int, int, int]:
        place = self._classes[key][index]
        return (place.began - now) / place.size, place.number, key, index
