"""The rank rows of every attached job: claimed in all pools, filled, copied out and freed.

On a device copies travel in the background (snapshot.py). What runs through the rows is not known
here.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from tlora.core.errors import JobFailed
from tlora.model.adapters import AdapterWeights, first_beyond
from tlora.model.cuda_link import courier_for
from tlora.model.job_rows import Held, JobRows, held_of
from tlora.model.pool import GroupPool
from tlora.model.rank_rows import clear, copy_all
from tlora.model.snapshot import Snapshot

T = TypeVar("T")


class AdapterRows:
    """Belongs to one super-model."""

    def __init__(self, pools: list[GroupPool], device: torch.device) -> None:
        self.pools = pools
        self.courier = courier_for(device)
        self.growths = 0
        """How often a pooled matrix has grown: it is another tensor then, and lies elsewhere."""

        self._device = device
        self._found: dict[str, JobRows] = {}

    def of(self, job: str) -> JobRows:
        """All that the job owns; good until it leaves or a pool grows."""
        if job not in self._found:
            self._found[job] = JobRows([part for pool in self.pools for part in pool.parts(job)])
        return self._found[job]

    def claim(self, job: str, weights: AdapterWeights, *, let_go: Callable[[], None]) -> None:
        """Rows for these matrices, filled with them; raises with nothing claimed. Before pools grow
        `let_go` is called: one matrix grows after the other, and what it was is free again unless
        somebody holds on to a part of it. Matrices on a device were looked at by who brought them
        there (`check_numbers`): nobody waits for a device here."""
        self.check_numbers(job, weights)
        self._found.pop(job, None)
        if not all(pool.has_room(weights) for pool in self.pools):
            self._found.clear()
            let_go()
        try:
            try:
                for pool in self.pools:
                    pool.claim(job, weights)
            finally:
                self._forget_if_moved()
            rows = self.of(job)
            self._fill(rows.places(weights))
            copy_all(rows.copied)
        except BaseException:
            self.free(job)
            raise

    def free(self, job: str) -> None:
        rows = self.of(job)
        for pool in self.pools:
            pool.free(job)
        del self._found[job]
        clear(rows.slices)

    def fill_moments(self, job: str, moments: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        rows = self.of(job)
        self._fill(
            [
                (matrix, tensors[name])
                for kind, tensors in moments.items()
                for name, matrix in rows.matrices(kind).items()
            ]
        )

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

    def _fill(self, places: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """(rows, matrix); matrices in host memory first go to the device together."""
        here = [index for index, (_, matrix) in enumerate(places) if matrix.device != self._device]
        sources = [places[index][1] for index in here]
        brought = self.courier.bring(sources, list).result() if here else []
        for index, matrix in zip(here, brought, strict=True):
            places[index] = (places[index][0], matrix)
        copy_all(places)

    def _forget_if_moved(self) -> None:
        """A pool that has grown lies elsewhere, with the rows of all."""
        growths = sum(rows.growths for pool in self.pools for rows in pool.matrices)
        if growths != self.growths:
            self.growths = growths
            self._found.clear()
