"""The rank rows of every attached job: claimed in all pools, filled, copied out and freed.

On a device copies travel in the background (snapshot.py). What runs through the rows is not known
here.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from tlora.core.errors import JobFailed
from tlora.model.adapters import AdapterWeights, first_beyond
from tlora.model.berth import Berth, Entry
from tlora.model.cuda_link import courier_for
from tlora.model.job_rows import Held, JobRows, Moments, held_of
from tlora.model.pool import GroupPool, Slot
from tlora.model.rank_rows import Places, clear, in_calls
from tlora.model.snapshot import Snapshot

T = TypeVar("T")
Slots = Sequence[Slot | None]
"""Of every pool."""


class AdapterRows:
    """Belongs to one super-model."""

    def __init__(self, pools: list[GroupPool], device: torch.device) -> None:
        self.pools = pools
        self.courier = courier_for(device)
        self.growths = 0
        """How often a pooled matrix has grown: it is another tensor then, and lies elsewhere."""

        self._device = device
        self._found: dict[str, JobRows] = {}
        self._kept: dict[weakref.ref[Berth], Slots] = {}
        self._given_up: deque[weakref.ref[Berth]] = deque()
        """Berths that nobody holds on to any more, told by whatever thread was the last to."""

        self._books = threading.Lock()
        """Rows are claimed and released by one at a time. Held for a moment only: who trains waits
        for it when a job comes or goes."""

        self._still = threading.Lock()
        """While rows are listed no pool grows. Taken after the other, if both are."""

    def of(self, job: str) -> JobRows:
        """All that the job owns; good until it leaves or a pool grows."""
        if job not in self._found:
            self._found[job] = JobRows([part for pool in self.pools for part in pool.parts(job)])
        return self._found[job]

    def keep(self, job: str, weights: AdapterWeights, moments: Moments) -> Berth | None:
        """Rows for a job that is to be claimed with these very tensors, found and listed by any
        thread while others train. None where pools have no room, or matrices lie elsewhere: then
        all of it is done by `claim`. Raises as that does, and both trust matrices on a device."""
        if any(matrix.device != self._device for matrix in _matrices(weights, moments)):
            return None
        self.check_numbers(job, weights)
        berth = Berth(weights, moments)
        with self._books:
            self._take_back()
            if not self._has_room(weights):
                return None
            slots = self._claim_all(weights)
            reference = weakref.ref(berth, self._given_up.append)
            self._kept[reference] = slots
        with self._still:
            if reference not in self._kept:
                return None
            berth.entry = self._entry(slots, weights, moments)
        return berth

    def claim(
        self,
        job: str,
        weights: AdapterWeights,
        moments: Moments | None = None,
        *,
        let_go: Callable[[], None],
    ) -> None:
        """Rows for these matrices, filled with them: those that are kept for them, if there are
        any. Raises with nothing claimed. Sooner than pools grow rows that are kept for others are
        taken back; before they grow `let_go` is called: one matrix grows after the other, and what
        it was is free again unless somebody holds on to a part of it. Matrices on a device were
        looked at by who brought them there (`check_numbers`): nobody waits for a device here."""
        moments = moments or {}
        slots, entry = self._take_kept(weights, moments)
        if slots is None:
            self.check_numbers(job, weights)
            slots = self._claim(weights, let_go)
        self._found.pop(job, None)
        for pool, slot in zip(self.pools, slots, strict=True):
            pool.give(job, slot)
        try:
            entry = entry or self._entry(slots, weights, moments)
            self._found[job] = entry.rows
            entry.fill()
        except BaseException:
            self.free(job)
            raise

    def free(self, job: str) -> None:
        rows = self.of(job)
        del self._found[job]
        # Before anybody else can have them.
        clear(rows.slices)
        with self._books:
            for pool in self.pools:
                pool.free(job)

    def snapshot(self, job: str, make: Callable[[Held], T], *, moments: bool) -> Snapshot[T]:
        rows, kinds = self.of(job), ("value", "exp_avg", "exp_avg_sq") if moments else ("value",)
        # Not the rows themselves: a snapshot may outlive a pool that has moved.
        cuts = rows.cuts
        return self.courier.take(
            [part for kind in kinds for part in rows.flat(kind)],
            lambda copies: make(held_of(copies, kinds, cuts)),
        )

    def check_numbers(self, job: str, weights: AdapterWeights) -> None:
        """Of matrices in host memory. Raises JobFailed if one of them holds what is no finite
        number in the format that kernels are given it in."""
        formats: dict[torch.dtype, AdapterWeights] = {}
        for pool in self.pools:
            own = formats.setdefault(pool.a.operand.dtype, {})
            for path in (target.path for target in pool.targets):
                if path in weights and weights[path].a.device.type == "cpu":
                    own[path] = weights[path]
        for dtype, own in formats.items():
            path = first_beyond(own, dtype)
            if path is not None:
                raise JobFailed(
                    f"its adapter holds weights on {path} that are no finite numbers in "
                    f"{str(dtype).removeprefix('torch.')}; start it from another adapter or an "
                    "earlier checkpoint",
                    job=job,
                )

    def check_integrity(self) -> None:
        with self._books:
            self._take_back()
            for number, pool in enumerate(self.pools):
                pool.check_integrity(slots[number] for slots in self._kept.values())

    def _entry(self, slots: Slots, weights: AdapterWeights, moments: Moments) -> Entry:
        claimed = zip(self.pools, slots, strict=True)
        rows = JobRows([part for pool, slot in claimed for part in pool.parts_of(slot)])
        places = self._brought([*rows.places(weights), *rows.moment_places(moments)])
        # Copies for kernels are made of what is in the rows by then.
        return Entry(rows, [*in_calls(places), *in_calls(rows.copied)])

    def _brought(self, places: Places) -> Places:
        """Matrices in host memory first go to the device together."""
        here = [index for index, (_, matrix) in enumerate(places) if matrix.device != self._device]
        if not here:
            return places
        brought = self.courier.bring([places[index][1] for index in here], list).result()
        there = dict(zip(here, brought, strict=True))
        return [(rows, there.get(index, matrix)) for index, (rows, matrix) in enumerate(places)]

    def _has_room(self, weights: AdapterWeights) -> bool:
        return all(pool.has_room(weights) for pool in self.pools)

    def _claim(self, weights: AdapterWeights, let_go: Callable[[], None]) -> Slots:
        with self._books:
            self._take_back()
            if self._has_room(weights):
                return self._claim_all(weights)
            with self._still:
                # Who is on its way may never come, and nobody may hold on to what pools were.
                self._call_off()
                if self._has_room(weights):
                    return self._claim_all(weights)
                self._found.clear()
                let_go()
                try:
                    return self._claim_all(weights)
                finally:
                    matrices = (rows for pool in self.pools for rows in pool.matrices)
                    self.growths = sum(rows.growths for rows in matrices)

    def _claim_all(self, weights: AdapterWeights) -> Slots:
        slots: list[Slot | None] = []
        try:
            for pool in self.pools:
                slots.append(pool.claim(weights))
        except BaseException:
            self._release(slots)
            raise
        return slots

    def _take_kept(
        self, weights: AdapterWeights, moments: Moments
    ) -> tuple[Slots, Entry | None] | tuple[None, None]:
        with self._books:
            for reference in self._kept:
                berth = reference()
                if berth is not None and berth.is_for(weights, moments):
                    # The rows are not the berth's from here on, nor does it hold on to them.
                    entry, berth.entry = berth.entry, None
                    return self._kept.pop(reference), entry
        return None, None

    def _take_back(self) -> None:
        """The rows of berths that were given up."""
        while self._given_up:
            slots = self._kept.pop(self._given_up.popleft(), None)
            # Its rows may have been taken or called off before.
            if slots is not None:
                self._release(slots)

    def _release(self, slots: Slots) -> None:
        for pool, slot in zip(self.pools, slots, strict=False):
            pool.release(slot)

    def _call_off(self) -> None:
        """All that is kept: who comes then finds rows when it is attached."""
        for reference, slots in self._kept.items():
            berth = reference()
            if berth is not None:
                berth.entry = None
            self._release(slots)
        self._kept.clear()


def _matrices(weights: AdapterWeights, moments: Moments) -> Iterator[torch.Tensor]:
    for pair in weights.values():
        yield from (pair.a, pair.b)
    for tensors in moments.values():
        yield from tensors.values()
