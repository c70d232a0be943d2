"""Between a device and the host through a few fixed buffers.

A copy runs at full speed only from and to page-locked memory, and locking gigabytes takes seconds:
so there are small buffers (lanes) that are used in turn. While the device works on one, the host
empties or fills the other. What a lane is made of is the device's matter (cuda_link.py).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch


class Lane(Protocol):
    """A staging buffer: flat, float32, in host memory."""

    buffer: torch.Tensor

    def read(self, source: torch.Tensor) -> None:
        """Begin to copy a flat tensor of the device into the front of the buffer."""
        ...

    def write(self, target: torch.Tensor) -> None:
        """Begin to copy the front of the buffer into a flat tensor of the device."""
        ...

    def wait(self) -> None:
        """Until what was begun is done."""
        ...


class Piece(NamedTuple):
    """A part of a flat tensor that fits a lane."""

    tensor: int
    first: int
    end: int


def pieces(sizes: Sequence[int], largest: int) -> Iterator[Piece]:
    for tensor, size in enumerate(sizes):
        for first in range(0, size, largest):
            yield Piece(tensor, first, min(size, first + largest))


def runs(sizes: Sequence[int], largest: int) -> list[range]:
    """Neighbours taken together up to `largest`; what is larger stays alone."""
    found: list[range] = []
    first, held = 0, 0
    for index, size in enumerate(sizes):
        if index > first and held + size > largest:
            found.append(range(first, index))
            first, held = index, 0
        held += size
    if first < len(sizes):
        found.append(range(first, len(sizes)))
    return found


def copy_out(slabs: list[list[torch.Tensor]], lanes: Sequence[Lane]) -> list[torch.Tensor]:
    """Flat tensors of the device in ordinary host memory, in their order. The tensors of a slab lie
    one behind the other; the slab is let go when it has been read."""
    copies: list[torch.Tensor] = []
    turns = _Turns(lanes)
    for index in range(len(slabs)):
        sizes = [each.shape[0] for each in slabs[index]]
        source, copy = _whole(slabs[index], sizes), torch.empty(sum(sizes))
        slabs[index] = []
        for piece in pieces([len(copy)], len(lanes[0].buffer)):
            lane = turns.next()
            lane.read(source[piece.first : piece.end])
            part = copy[piece.first : piece.end]
            turns.after(lambda lane=lane, part=part: part.copy_(lane.buffer[: len(part)]))
        # The last pieces are still on their way, from memory that is about to be free.
        turns.finish()
        copies += copy.split(sizes)
    return copies


def copy_in(
    sources: Sequence[torch.Tensor], slabs: list[list[torch.Tensor]], lanes: Sequence[Lane]
) -> None:
    """Flat host tensors into those of the device, which lie in slabs as in `copy_out`."""
    turns = _Turns(lanes)
    largest = len(lanes[0].buffer)
    left = list(sources)
    for slab in slabs:
        sizes = [each.shape[0] for each in slab]
        mine, left = left[: len(slab)], left[len(slab) :]
        target = _whole(slab, sizes)
        for filled in _fillings(sizes, largest):
            lane = turns.next()
            sources = [_piece_of(mine[piece.tensor], piece) for piece in filled.pieces]
            count = sum(piece.end - piece.first for piece in filled.pieces)
            # In one call: there are hundreds of small ones.
            torch.cat(sources, out=lane.buffer[:count])
            lane.write(target[filled.first : filled.first + count])
            turns.after(lambda: None)
    turns.finish()


def _piece_of(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    whole = piece.first == 0 and piece.end == tensor.shape[0]
    return tensor if whole else tensor[piece.first : piece.end]


class Filling(NamedTuple):
    """What goes through a lane at once: pieces of a slab that lie one behind the other."""

    first: int
    pieces: list[Piece]


def _fillings(sizes: Sequence[int], largest: int) -> Iterator[Filling]:
    at, held, waiting = 0, 0, list[Piece]()
    for piece in pieces(sizes, largest):
        size = piece.end - piece.first
        if held + size > largest:
            yield Filling(at, waiting)
            at, held, waiting = at + held, 0, []
        waiting.append(piece)
        held += size
    if waiting:
        yield Filling(at, waiting)


class _Turns:
    """Lanes in turn. What is to be done when a lane's copy is through is done before the lane is
    used again."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._number = 0
        self._under_way: list[tuple[Lane, Callable[[], object]]] = []

    def next(self) -> Lane:
        if len(self._under_way) == len(self._lanes):
            self._complete()
        lane = self._lanes[self._number % len(self._lanes)]
        self._number += 1
        return lane

    def after(self, then: Callable[[], object]) -> None:
        self._under_way.append((self._lanes[(self._number - 1) % len(self._lanes)], then))

    def finish(self) -> None:
        while self._under_way:
            self._complete()

    def _complete(self) -> None:
        lane, then = self._under_way.pop(0)
        lane.wait()
        then()


def _whole(slab: list[torch.Tensor], sizes: list[int]) -> torch.Tensor:
    """The one flat tensor that these are cut from."""
    first = slab[0]
    return first.as_strided((sum(sizes),), (1,), first.storage_offset())
