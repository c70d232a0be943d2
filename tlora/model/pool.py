"""Where adapters live: rows of a few large tensors, claimed and freed like memory.

For a group of linears that share an input there is one A of [rank rows, in] and per linear one B
transposed of [rank rows, out]. Gradients and the optimiser's moments have the same shape and the
same rows. A job owns a contiguous range in each; attaching and detaching touch nobody else's rows.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tlora.kernels.multi_lora import Route
from tlora.model.adapters import AdapterWeights, LoraPair
from tlora.model.targets import Target

logger = logging.getLogger(__name__)


class RowAllocator:
    """First fit over [0, capacity)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._claimed: dict[int, int] = {}

    def claim(self, rows: int) -> int | None:
        """The first row of a free range, or None if no gap is large enough."""
        first = 0
        for start in sorted(self._claimed):
            if start - first >= rows:
                break
            first = start + self._claimed[start]
        if first + rows > self.capacity:
            return None
        self._claimed[first] = rows
        return first

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

    def copied(self, first: int, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(copy for kernels, matrix) of these rows, if there is a copy."""
        if not self.has_copy:
            return []
        return [(rows_of(self.operand, first, rows), rows_of(self.value, first, rows))]

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


def copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """(to, from), by a few launches where both lie alike."""
    alike = [pair for pair in pairs if pair[0].is_contiguous() and pair[1].is_contiguous()]
    if alike:
        torch._foreach_copy_([to for to, _ in alike], [source for _, source in alike])
    for to, source in pairs:
        if not (to.is_contiguous() and source.is_contiguous()):
            to.copy_(source)


def adapter_of(values: Mapping[str, torch.Tensor], *, copied: bool = True) -> AdapterWeights:
    """Matrices by `PATH.lora_A` and `PATH.lora_B`, as they lie in the pool, as an adapter. A copied
    one does not hold on to the memory around them; the other is only a way to look at them."""
    found: AdapterWeights = {}
    for name, a in values.items():
        if name.endswith(".lora_A"):
            path = name.removesuffix(".lora_A")
            b = values[f"{path}.lora_B"].T
            if copied:
                a, b = a.clone(), b.clone(memory_format=torch.contiguous_format)
            found[path] = LoraPair(a=a, b=b)
    return found


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one job's rows are in a group; rank 0 where it has no adapter."""

    a_row: int
    ranks: tuple[int, ...]
    b_rows: tuple[int, ...]


class GroupPool:
    """The adapters of all jobs on the linears that share one input."""

    def __init__(
        self,
        targets: list[Target],
        capacity: int,
        device: torch.device,
        operand_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.targets = targets
        width = targets[0].in_features
        self.a = RankRows(width, capacity * len(targets), device, operand_dtype)
        # The leaf that makes the outputs part of the graph; its gradient goes into a.grad directly.
        self.a.operand.requires_grad_(True)
        self.b = [
            RankRows(target.out_features, capacity, device, operand_dtype) for target in targets
        ]
        self.slots: dict[str, Slot] = {}
        self.route: Route | None = None
        """The segments of the nano-batch that runs now (routing.py); one object deep, for compiled
        code."""

    @property
    def matrices(self) -> list[RankRows]:
        """A, and the B of each linear."""
        return [self.a, *self.b]

    @property
    def layout(self) -> tuple[tuple[str, Slot], ...]:
        """Groups with equal layouts can share their tables."""
        return tuple(sorted(self.slots.items()))

    @torch.no_grad()
    def attach(self, job: str, weights: AdapterWeights) -> None:
        self.claim(job, weights)
        copy_all(self.places(job, weights))
        copy_all(self.copied(job))

    def claim(self, job: str, weights: AdapterWeights) -> None:
        """Rows for the matrices of this group's linears. Raises, with nothing claimed, if a pool
        cannot grow."""
        assert job not in self.slots, f"{job} is attached already"
        pairs = [weights.get(target.path) for target in self.targets]
        ranks = tuple(0 if pair is None else len(pair.a) for pair in pairs)
        if any(ranks):
            self.slots[job] = self._claim(ranks)

    def places(self, job: str, weights: AdapterWeights) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(rows, matrix) for each that is to be filled in; B's rows turned as B is."""
        found, slot = [], self.slots.get(job)
        if slot is None:
            return found
        a_row = slot.a_row
        for target, rows, rank, b_row in zip(
            self.targets, self.b, slot.ranks, slot.b_rows, strict=True
        ):
            if rank:
                pair = weights[target.path]
                found.append((rows_of(self.a.value, a_row, rank), pair.a))
                found.append((rows_of(rows.value, b_row, rank).T, pair.b))
            a_row += rank
        return found

    def copied(self, job: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(copy for kernels, matrix) of all that a job owns."""
        return [pair for rows, first, size in self._owned(job) for pair in rows.copied(first, size)]

    def _claim(self, ranks: tuple[int, ...]) -> Slot:
        a_row = self.a.claim(sum(ranks))
        b_rows: list[int] = []
        try:
            for rank, rows in zip(ranks, self.b, strict=True):
                b_rows.append(rows.claim(rank) if rank else 0)
        except BaseException:
            self.a.release(a_row, sum(ranks))
            for b_row, rank, rows in zip(b_rows, ranks, self.b, strict=False):
                if rank:
                    rows.release(b_row, rank)
            raise
        return Slot(a_row, ranks, tuple(b_rows))

    @torch.no_grad()
    def detach(self, job: str) -> None:
        clear(self.free(job))

    def free(self, job: str) -> list[torch.Tensor]:
        """Give the job's rows back; the caller clears them."""
        owned = self._owned(job)
        self.slots.pop(job, None)
        for rows, first, _ in owned:
            rows.allocator.release(first)
        return [each for rows, first, size in owned for each in rows.slices(first, size)]

    def views(self, job: str) -> list[tuple[str, RowViews]]:
        """(name, rows) of every matrix of a job, `PATH.lora_A` before `PATH.lora_B`."""
        named = []
        for target, views in zip(self.targets, self._pairs_of(job), strict=True):
            if views is not None:
                named.append((f"{target.path}.lora_A", views[0]))
                named.append((f"{target.path}.lora_B", views[1]))
        return named

    def parts(self, job: str) -> list[tuple[RowViews, int, int]]:
        """(whole matrices, first row, rows) of all that a job owns; its A of all linears is one."""
        return [(rows.tensors, first, size) for rows, first, size in self._owned(job)]

    def cuts(self, job: str) -> list[list[tuple[str, int]]]:
        """For each of `parts`: the names and ranks of the matrices that lie in it."""
        slot = self.slots.get(job)
        if slot is None:
            return []
        ranked = [
            (target.path, rank)
            for target, rank in zip(self.targets, slot.ranks, strict=True)
            if rank
        ]
        of_a = [(f"{path}.lora_A", rank) for path, rank in ranked]
        return [of_a, *([(f"{path}.lora_B", rank)] for path, rank in ranked)]

    def check_integrity(self) -> None:
        slots = self.slots.values()
        self.a.allocator.check_integrity([(slot.a_row, sum(slot.ranks)) for slot in slots])
        for i, rows in enumerate(self.b):
            owned = [(slot.b_rows[i], slot.ranks[i]) for slot in slots if slot.ranks[i]]
            rows.allocator.check_integrity(owned)

    def _owned(self, job: str) -> list[tuple[RankRows, int, int]]:
        slot = self.slots.get(job)
        if slot is None:
            return []
        of_b = zip(self.b, slot.b_rows, slot.ranks, strict=True)
        return [
            (self.a, slot.a_row, sum(slot.ranks)),
            *((rows, b_row, rank) for rows, b_row, rank in of_b if rank),
        ]

    def _pairs_of(self, job: str) -> list[tuple[RowViews, RowViews] | None]:
        slot = self.slots.get(job)
        if slot is None:
            return [None] * len(self.targets)
        pairs: list[tuple[RowViews, RowViews] | None] = []
        a_row = slot.a_row
        for rows, rank, b_row in zip(self.b, slot.ranks, slot.b_rows, strict=True):
            pairs.append((self.a.view(a_row, rank), rows.view(b_row, rank)) if rank else None)
            a_row += rank
        return pairs
