"""Where adapters live: rows of a few large tensors, claimed and freed like memory.

For a group of linears that share an input there is one A of [rank rows, in] and per linear one B
transposed of [rank rows, out]. Gradients and the optimiser's moments have the same shape and the
same rows. A job owns a contiguous range in each; attaching and detaching touch nobody else's rows.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from tlora.kernels.multi_lora import Route, Ways
from tlora.model.adapters import AdapterWeights
from tlora.model.job_rows import Cut, JobRows, Part
from tlora.model.rank_rows import RankRows, RowViews, clear, copy_all
from tlora.model.targets import Target


class Slot(NamedTuple):
    """Where one job's rows are in a group; rank 0 where it has no adapter. A plain tuple: with many
    jobs thousands of them are compared when one comes or goes."""

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
        inside: Ways = (),
    ) -> None:
        self.targets = targets
        self.inside = inside
        """Which products of these linears may take the adapters' update in their own loop."""

        width = targets[0].in_features
        self.a = RankRows(width, capacity * len(targets), device, operand_dtype)
        # The leaf that makes the outputs part of the graph; its gradient goes into a.grad directly.
        self.a.operand.requires_grad_(True)
        self.b = [
            RankRows(target.out_features, capacity, device, operand_dtype) for target in targets
        ]
        self._names = [(f"{each.path}.lora_A", f"{each.path}.lora_B") for each in targets]
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
        self.give(job, self.claim(weights))
        rows = JobRows(self.parts(job))
        copy_all(rows.places(weights))
        copy_all(rows.copied)

    def has_room(self, weights: AdapterWeights) -> bool:
        """For the matrices of this group's linears, as it is."""
        ranks = self._ranks(weights)
        whole = not any(ranks) or self.a.allocator.find(sum(ranks)) is not None
        return whole and all(
            rows.allocator.find(rank) is not None
            for rows, rank in zip(self.b, ranks, strict=True)
            if rank
        )

    def claim(self, weights: AdapterWeights) -> Slot | None:
        """Rows for the matrices of this group's linears, nobody's yet; None if there is no such
        matrix. Raises, with nothing claimed, if a pool cannot grow."""
        ranks = self._ranks(weights)
        return self._claim(ranks) if any(ranks) else None

    def give(self, job: str, slot: Slot | None) -> None:
        """Rows that were claimed are the job's from here on."""
        assert job not in self.slots, f"{job} is attached already"
        if slot is not None:
            self.slots[job] = slot

    def _ranks(self, weights: AdapterWeights) -> tuple[int, ...]:
        pairs = [weights.get(target.path) for target in self.targets]
        return tuple(0 if pair is None else pair.a.shape[0] for pair in pairs)

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
        clear(JobRows(self.parts(job)).slices)
        self.free(job)

    def free(self, job: str) -> None:
        """Give the job's rows back, which the caller has cleared."""
        self.release(self.slots.pop(job, None))

    def release(self, slot: Slot | None) -> None:
        """The same of rows that were given to nobody: nothing was written in them."""
        if slot is None:
            return
        self.a.allocator.release(slot.a_row)
        for rows, rank, b_row in zip(self.b, slot.ranks, slot.b_rows, strict=True):
            if rank:
                rows.allocator.release(b_row)

    def views(self, job: str) -> list[tuple[str, RowViews]]:
        """(name, rows) of every matrix of a job, `PATH.lora_A` before `PATH.lora_B`."""
        return list(JobRows(self.parts(job)).views.items())

    def parts(self, job: str) -> list[Part]:
        """All that a job owns; its A of all linears is one."""
        return self.parts_of(self.slots.get(job))

    def parts_of(self, slot: Slot | None) -> list[Part]:
        if slot is None:
            return []
        of_a: Cut = []
        parts = [Part(self.a, slot.a_row, sum(slot.ranks), of_a)]
        for (a, b), rows, rank, b_row in zip(
            self._names, self.b, slot.ranks, slot.b_rows, strict=True
        ):
            if rank:
                of_a.append((a, rank))
                parts.append(Part(rows, b_row, rank, [(b, rank)]))
        return parts

    def check_integrity(self, kept: Iterable[Slot | None] = ()) -> None:
        """`kept` are slots that were given to nobody yet."""
        slots = [*self.slots.values(), *(slot for slot in kept if slot is not None)]
        self.a.allocator.check_integrity([(slot.a_row, sum(slot.ranks)) for slot in slots])
        for i, rows in enumerate(self.b):
            owned = [(slot.b_rows[i], slot.ranks[i]) for slot in slots if slot.ranks[i]]
            rows.allocator.check_integrity(owned)
