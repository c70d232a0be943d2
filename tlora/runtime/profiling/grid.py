"""Which nano-batches are measured, and which of them are kept from the fit: a pure choice.

Sizes double, as do the buckets of the engine; at each size lengths, numbers of jobs and ranks are
changed one at a time, so that every parameter of the model has points that tell it from the
others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RANKS = (8, 64, 4, 16, 16, 32, 64, 8)
"""Of the jobs that are attached; a team is some of them, by place."""

SMALL, LARGE = (0,), (1,)
FOUR = (0, 3, 4, 5)
EIGHT = tuple(range(8))
BARE = (8,)
"""The one that adapts a single linear: the frozen backbone, but for that."""

SIZES = 6
FEW = 2
"""So many kinds at the largest size, which takes as long as all others together."""

HELDOUT_PART = 0.2
MIXED_FILL = 0.92
"""Nano-batches of mixed lengths end below their size, as real ones do: the rest is padding."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One nano-batch to measure."""

    rows: int
    lengths: tuple[int, ...]
    """Of its sequences, which are dealt to the team in turn."""

    team: tuple[int, ...]
    heldout: bool

    @property
    def longest(self) -> int:
        return max(self.lengths)


def lengths_within(positions: int | None, largest: int) -> tuple[int, int, int]:
    """Short, middle and long sequences: 128, 512 and 2,048 where there is room for them."""
    room = min(positions or largest, largest)
    longest = min(2048, room)
    return max(2, longest // 16), max(2, longest // 4), longest


def choose_plans(
    *, largest: int, positions: int | None, generator: np.random.Generator
) -> list[Plan]:
    """In no order that matters. Whatever is held out is chosen before anything is measured."""
    sizes = [size for size in (largest >> i for i in range(SIZES)) if size >= 64]
    short, middle, long = lengths_within(positions, largest)
    plans: list[Plan] = []

    def add(rows: int, length: int, team: tuple[int, ...], heldout: bool) -> None:
        if length <= rows:
            plans.append(Plan(rows, whole(rows, length), team, heldout))

    candidates = [
        (rows, length, team)
        for rows in sizes
        for length, team in (
            (middle, EIGHT),
            (long, FOUR),
            (middle, SMALL),
            (middle, LARGE),
            (short, FOUR),
        )[: FEW if rows == largest and len(sizes) == SIZES else None]
    ]
    kept = set(
        generator.permutation(len(candidates))[: round(HELDOUT_PART * len(candidates))].tolist()
    )
    for place, (rows, length, team) in enumerate(candidates):
        add(rows, length, team, place in kept)
    # Where launches do not hide them, what adapters cost is the difference to these.
    for rows in sizes[:2]:
        add(rows, middle, BARE, heldout=False)
    # Like nothing that was fitted: lengths of all sizes in one nano-batch, and padding.
    for rows in sizes[:4]:
        drawn = mixed(round(MIXED_FILL * rows), (short, long), generator)
        plans.append(Plan(rows, drawn, EIGHT, heldout=True))
    return plans


def whole(tokens: int, length: int) -> tuple[int, ...]:
    """Sequences of one length, and a shorter one where it does not divide."""
    rest = tokens % length
    return (length,) * (tokens // length) + ((rest,) if rest > 1 else ())


def mixed(tokens: int, ends: tuple[int, int], generator: np.random.Generator) -> tuple[int, ...]:
    """Lengths between the ends, short ones more often, as data have them."""
    low, high = (np.log(min(end, tokens)) for end in ends)
    found: list[int] = []
    left = tokens
    while left > 1:
        length = min(left, max(2, round(float(np.exp(generator.uniform(low, high))))))
        found.append(length)
        left -= length
    return tuple(found)


def dealt(lengths: Sequence[int], team: Sequence[int]) -> dict[int, list[int]]:
    """Who gets which sequences: in turn, so that fewer sequences than jobs make fewer segments."""
    hands: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        hands.setdefault(team[place % len(team)], []).append(length)
    return hands
