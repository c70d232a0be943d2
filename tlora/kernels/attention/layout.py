"""How sequences of a packed row are laid side by side for attention.

A call costs some time by itself, so sequences of nearly one length share one: each is continued to
the longest of its group by repeats of its own last row. Under a causal mask no row of the sequence
sees what comes after it, so the repeats change nothing; and since they are its own rows, a NaN in
one sequence stays there.
"""

from dataclasses import dataclass

import numpy as np
import torch

CALL_COST = 300_000
"""What one more call costs, in length^2 x width: about 150 us forward and backward on one core,
where attention takes 0.065 us per length^2 at a width (heads x head size) of 128."""


MIN_GROUPS = 16


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """T packed rows, P rows of the groups."""

    num_rows: int
    groups: list[tuple[int, int]]
    """(sequences, length) of each call, in the order of the P rows."""

    sources: torch.Tensor
    """int64 [P]: the packed row that each row of the groups is a copy of."""

    places: torch.Tensor
    """int64 [tokens]: where in the groups each packed row is; padding at the tail has no place."""

    repeats: torch.Tensor
    """int64: the rows of the groups that repeat a sequence's last row."""

    repeated: torch.Tensor
    """bool [P]: the same, row by row."""

    sizes: torch.Tensor
    """int64 [a power of two, 2]: `groups` in host memory, and zeros."""


def plan_groups(lengths: list[int], width: int, *, one_by_one: bool = False) -> list[list[int]]:
    """The sequences of each call. From the longest down, a group takes the next until the work
    wasted on its repeats would have paid for another call. `one_by_one` gives each its own."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    waste = 0
    for i in order:
        if groups and not one_by_one:
            waste += (lengths[groups[-1][0]] ** 2 - lengths[i] ** 2) * width
        if not groups or one_by_one or waste > CALL_COST:
            groups.append([])
            waste = 0
        groups[-1].append(i)
    return groups


def attention_layout(
    lengths: list[int],
    num_rows: int,
    width: int,
    device: torch.device | str = "cpu",
    *,
    one_by_one: bool = False,
) -> AttentionLayout:
    """`width` is heads x head size of the queries."""
    starts = np.cumsum([0, *lengths])
    places = np.zeros(starts[-1], dtype=np.int64)
    sources: list[np.ndarray] = []
    repeats: list[np.ndarray] = []
    shapes: list[tuple[int, int]] = []
    first = 0
    for group in plan_groups(lengths, width, one_by_one=one_by_one):
        longest = lengths[group[0]]
        steps = np.arange(longest)
        for i in group:
            length = lengths[i]
            sources.append(starts[i] + np.minimum(steps, length - 1))
            places[starts[i] : starts[i + 1]] = first + steps[:length]
            repeats.append(first + steps[length:])
            first += longest
        shapes.append((len(group), longest))

    def gather(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts])).to(device)

    return AttentionLayout(
        num_rows=num_rows,
        groups=shapes,
        sources=gather(sources),
        places=gather([places]),
        repeats=gather(repeats),
        repeated=_marked(gather(repeats), first),
        sizes=_padded(shapes),
    )


def _marked(index: torch.Tensor, count: int) -> torch.Tensor:
    marks = torch.zeros(count, dtype=torch.bool, device=index.device)
    marks[index] = True
    return marks


def _padded(groups: list[tuple[int, int]]) -> torch.Tensor:
    sizes = torch.zeros(max(MIN_GROUPS, 1 << len(groups).bit_length()), 2, dtype=torch.int64)
    if groups:
        sizes[: len(groups)] = torch.tensor(groups)
    return sizes
