"""Pooled matrices: rows that are claimed and freed like memory, and what may be done to many of
them at once."""

import logging
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)


class RowAllocator:
    """First fit over [0, capacity)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._claimed: dict[int, int] = {}

    def claim(self, rows: int) -> int | None:
        """The first row of a free range, or None if no gap is large enough."""
        first = self.find(rows)
        if first is not None:
            self._claimed[first] = rows
        return first

    def find(self, rows: int) -> int | None:
        """Where they would be."""
        first = 0
        for start in sorted(self._claimed):
            if start - first >= rows:
                break
            first = start + self._claimed[start]
        return first if first + rows <= self.capacity else None

    def release(self, first: int) -> None:
        del self._claimed[first]

    def grow(self, capacity: int) -> None:
        assert capacity >= self.capacity
        self.capacity = capacity

    def check_integrity(self, owned: list[tuple[int, int]]) -> None:
        """No two claims overlap, and they are the (first row, rows) that the owners know of."""
        end = 0
        for start in sorted(self._claimed):
            assert start >= end, f"rows {start}.. overlap the range before them"
            end = start + self._claimed[start]
        assert end <= self.capacity, f"rows up to {end} are claimed of {self.capacity}"
        claimed = sorted(self._claimed.items())
        assert claimed == sorted(owned), f"{claimed} are claimed, {sorted(owned)} are owned"


class RowViews(NamedTuple):
    """One job's rows of one matrix."""

    value: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class RankRows:
    """One pooled matrix with its gradient and AdamW's moments, all float32 [capacity, width]; and
    what kernels multiply with: the matrix itself, or a copy in the format of their products."""

    def __init__(
        self,
        width: int,
        capacity: int,
        device: torch.device,
        operand_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.allocator = RowAllocator(capacity)
        self.tensors = RowViews(*(torch.zeros(capacity, width, device=device) for _ in range(4)))
        self.operand = self.value.to(operand_dtype)
        self.growths = 0

    @property
    def value(self) -> torch.Tensor:
        return self.tensors.value

    @property
    def grad(self) -> torch.Tensor:
        return self.tensors.grad

    @property
    def has_copy(self) -> bool:
        return self.operand is not self.value

    @property
    def copy(self) -> torch.Tensor | None:
        """What lies in it is always a finite number: kernels may multiply the rows of a neighbour
        by zero. Whoever writes a value writes its copy."""
        return self.operand if self.has_copy else None

    def claim(self, rows: int) -> int:
        first = self.allocator.claim(rows)
        if first is None:
            self._grow(max(2 * self.allocator.capacity, self.allocator.capacity + rows))
            first = self.allocator.claim(rows)
            assert first is not None
        return first

    def release(self, first: int, rows: int) -> None:
        """Free the rows and clear them, so that nothing of a job outlives it."""
        self.allocator.release(first)
        clear(self.slices(first, rows))

    def slices(self, first: int, rows: int) -> list[torch.Tensor]:
        """All that these rows are: matrix, gradient, moments, and the copy for kernels."""
        copied = [rows_of(self.operand, first, rows)] if self.has_copy else []
        return [*self.view(first, rows), *copied]

    def view(self, first: int, rows: int) -> RowViews:
        return RowViews(*(rows_of(tensor, first, rows) for tensor in self.tensors))

    def _grow(self, capacity: int) -> None:
        old = self.allocator.capacity
        logger.info("adapter pool grows from %d to %d rank rows", old, capacity)

        def grown(tensor: torch.Tensor) -> torch.Tensor:
            larger = tensor.new_zeros(capacity, tensor.shape[1])
            larger[:old] = tensor.detach()
            return larger.requires_grad_(tensor.requires_grad)

        # All of them before any is taken: there may be no room for the last.
        tensors = RowViews(*map(grown, self.tensors))
        self.operand = grown(self.operand) if self.has_copy else tensors.value
        self.tensors = tensors
        self.allocator.grow(capacity)
        self.growths += 1


def rows_of(tensor: torch.Tensor, first: int, rows: int) -> torch.Tensor:
    """Outside of any graph. There are thousands of these when a job comes or goes: no step more
    than needed."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.narrow(0, first, rows)


def clear(rows: list[torch.Tensor]) -> None:
    """By a few launches, however many there are."""
    for dtype in {each.dtype for each in rows}:
        torch._foreach_zero_([each for each in rows if each.dtype == dtype])


Places = list[tuple[torch.Tensor, torch.Tensor]]
"""(rows, what is to be copied into them)."""

Copies = list[tuple[list[torch.Tensor], list[torch.Tensor]]]
"""The same in lists, each for one call."""


def in_calls(places: Places) -> Copies:
    """A few launches where both lie alike. The others are copied one by one, yet in one call: among
    those that lie alike a single other one would make them all slow."""
    calls: Copies = [([], []), ([], [])]
    for rows, source in places:
        targets, sources = calls[not (rows.is_contiguous() and source.is_contiguous())]
        targets.append(rows)
        sources.append(source)
    return [call for call in calls if call[0]]


def copy_all(places: Places) -> None:
    for targets, sources in in_calls(places):
        torch._foreach_copy_(targets, sources)
