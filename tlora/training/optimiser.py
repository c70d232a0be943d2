"""The optimiser steps of the jobs that are due: each with its own clipping and AdamW, over its own
rows of the pool.

Where Triton serves, all of them are one pass over the pool that waits for nothing (kernels/adamw).
Elsewhere each job is stepped by itself, with the arithmetic of `torch.optim.AdamW(fused=True)`: one
call for all of a job's matrices, which on a CPU takes a third of the time of a call per operation.
The moments live in the pool beside the weights.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from tlora.core.job import TrainSpec
from tlora.kernels.adamw import Order, Rows, Work, chunks_of, one_dtype
from tlora.kernels.multi_lora.routes import triton_serves
from tlora.model.pool import GroupPool, Slot
from tlora.model.rank_rows import RowViews


@dataclass(frozen=True, slots=True)
class AdamW:
    """What stays the same over a job's steps."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    @classmethod
    def of(cls, train: TrainSpec) -> "AdamW":
        return cls(train.adam_beta1, train.adam_beta2, train.adam_epsilon, train.weight_decay)


@dataclass(frozen=True, slots=True)
class DueStep:
    """One step of one job, whose gradients are complete."""

    job: str
    settings: AdamW
    learning_rate: float
    number: int
    """Counts the job's steps from 1."""

    max_grad_norm: float | None


class Adapters(Protocol):
    """What is needed of a super-model."""

    device: torch.device
    places: int
    """Another number whenever rows were claimed or freed."""

    @property
    def jobs(self) -> list[str]: ...

    @property
    def pools(self) -> Sequence[GroupPool]: ...

    def views(self, job: str) -> Mapping[str, RowViews]: ...


class _Chunks(NamedTuple):
    """A job's part of the list, and which rows it had then."""

    slots: list[Slot | None]
    table: np.ndarray


class PooledRows:
    """The rows of all jobs of a super-model, and the kernels' list of them. When jobs come or go,
    only their parts of the list are made, so that the others need not wait."""

    def __init__(self, adapters: Adapters) -> None:
        self.adapters = adapters
        self._work: Work | None = None
        self._chunks: dict[str, _Chunks] = {}
        self._growths: list[int] = []
        self._slots: dict[str, int] = {}
        self._places = -1

    def of(self, job: str) -> list[RowViews]:
        return list(self.adapters.views(job).values())

    def in_calls(self, due: list[DueStep]) -> list[list[DueStep]]:
        """All in one call where there is one pass for all; else each by itself, so that what fails
        one leaves the others alone."""
        if triton_serves(self.adapters.device):
            return [due] if due else []
        return [[each] for each in due]

    def work(self) -> tuple[Work, dict[str, int]]:
        """The list, and the slot of each job in it."""
        if self._work is None or self._places != self.adapters.places:
            jobs, pools = self.adapters.jobs, self.adapters.pools
            matrices = [each for pool in pools for each in pool.matrices]
            growths = [each.growths for each in matrices]
            if growths != self._growths:
                # A pool that has grown lies elsewhere.
                self._chunks, self._growths = {}, growths
            places = [pool.slots for pool in pools]
            self._chunks = {
                job: self._chunks_of(job, [slots.get(job) for slots in places]) for job in jobs
            }
            tables = [chunks.table for chunks in self._chunks.values()]
            copies = one_dtype(each.operand for each in matrices if each.has_copy)
            self._work = Work.of_tables(tables, self.adapters.device, copy_dtype=copies)
            self._slots = {job: slot for slot, job in enumerate(jobs)}
            self._places = self.adapters.places
        return self._work, self._slots

    def _chunks_of(self, job: str, slots: list[Slot | None]) -> _Chunks:
        known = self._chunks.get(job)
        if known is not None and known.slots == slots:
            return known
        rows = [
            Rows(part.matrix.tensors, part.first, part.rows, part.matrix.copy)
            for pool in self.adapters.pools
            for part in pool.parts(job)
        ]
        return _Chunks(slots, chunks_of(rows))


def step_jobs(rows: PooledRows, due: Sequence[DueStep]) -> torch.Tensor:
    """Step these jobs and clear their gradients: their norms before clipping, float32 on the
    device. A job whose norm is not finite keeps its weights and moments. On CUDA this only
    launches; whoever reads the norms waits; and NaN also stands for new weights that are no finite
    numbers. On a CPU such weights show in the next loss or evaluation: to look for them would make
    a step a sixth longer."""
    if triton_serves(rows.adapters.device):
        return _step_pooled(rows, due)
    norms = [_step_alone(rows.of(each.job), each) for each in due]
    return torch.tensor(norms, dtype=torch.float32)


def _step_pooled(rows: PooledRows, due: Sequence[DueStep]) -> torch.Tensor:
    # Triton is not everywhere.
    from tlora.kernels.adamw import triton_steps

    work, slots = rows.work()
    orders = [
        Order(
            slot=slots[each.job],
            learning_rate=each.learning_rate,
            beta1=each.settings.beta1,
            beta2=each.settings.beta2,
            epsilon=each.settings.epsilon,
            weight_decay=each.settings.weight_decay,
            number=each.number,
            max_norm=each.max_grad_norm,
        )
        for each in due
    ]
    return triton_steps.step(work, orders)


def _step_alone(rows: list[RowViews], due: DueStep) -> float:
    norm = gradient_norm(rows)
    grad_norm = float(norm)
    if math.isfinite(grad_norm):
        if due.max_grad_norm is not None and grad_norm + 1e-6 > due.max_grad_norm:
            clip(rows, norm, due.max_grad_norm)
        step(rows, due.settings, learning_rate=due.learning_rate, number=due.number)
    clear_gradients(rows)
    return grad_norm


@torch.no_grad()
def gradient_norm(rows: list[RowViews]) -> torch.Tensor:
    """The 2-norm over all of a job's gradients."""
    norms = torch._foreach_norm([row.grad for row in rows])
    return torch.linalg.vector_norm(torch.stack(list(norms)))


@torch.no_grad()
def are_finite(weights: list[torch.Tensor]) -> torch.Tensor:
    """Whether every weight of the job is a number; its largest is then one too. On the device."""
    largest = torch._foreach_norm(weights, float("inf"))
    return torch.stack(list(largest)).isfinite().all()


@torch.no_grad()
def clip(rows: list[RowViews], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the job's gradients down to `max_norm`, as torch.nn.utils.clip_grad_norm_ does."""
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_([row.grad for row in rows], coefficient)


@torch.no_grad()
def step(rows: list[RowViews], settings: AdamW, *, learning_rate: float, number: int) -> None:
    """Update the job's weights and moments; `number` counts its steps from 1. Gradients are left
    alone."""
    if not rows:
        return
    # The same count for every matrix, and only read.
    count = torch.tensor(float(number), device=rows[0].value.device)
    torch._fused_adamw_(
        [row.value for row in rows],
        [row.grad for row in rows],
        [row.exp_avg for row in rows],
        [row.exp_avg_sq for row in rows],
        [],
        [count] * len(rows),
        lr=learning_rate,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        eps=settings.epsilon,
        amsgrad=False,
        maximize=False,
    )


@torch.no_grad()
def clear_gradients(rows: list[RowViews]) -> None:
    torch._foreach_zero_([row.grad for row in rows])
