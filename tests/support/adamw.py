"""Pools for the pooled optimiser, and the right answer by torch's own AdamW and clipping.

Rows that belong to nobody hold NaN, so that whoever reads them shows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from support.interpreter import SEED
from tlora.kernels.adamw import Order, Rows, Work

GAP = 3
"""Rows of nobody before every job's rows, and after the last: rows of odd width begin anywhere."""


@dataclass(frozen=True)
class Job:
    ranks: tuple[int, ...]
    """Of each matrix; 0 where it has none."""

    seed: int
    """Of its weights and gradients, which are the same in every pool."""

    rate: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    decay: float = 0.0
    max_norm: float | None = None

    def order(self, slot: int, number: int) -> Order:
        return Order(
            slot,
            self.rate / number,
            *self.betas,
            epsilon=self.epsilon,
            weight_decay=self.decay,
            number=number,
            max_norm=self.max_norm,
        )


class Problem:
    """Pooled matrices of these widths, with the rows of these jobs one after another."""

    def __init__(
        self,
        widths: Sequence[int],
        jobs: Sequence[Job],
        device: str,
        *,
        chunk: int,
        copies: Sequence[torch.dtype | None] | None = None,
    ):
        """`copies` has the format of each matrix's copy, if there are any."""
        self.widths, self.jobs, self.device = widths, jobs, device
        self.first: list[list[int]] = []
        rows = [GAP] * len(widths)
        for job in jobs:
            self.first.append(list(rows))
            rows = [row + rank + GAP for row, rank in zip(rows, job.ranks, strict=True)]
        self.matrices = [
            tuple(torch.full((count, width), float("nan"), device=device) for _ in range(4))
            for count, width in zip(rows, widths, strict=True)
        ]
        self.copies = [
            None if dtype is None else matrix[0].to(dtype)
            for matrix, dtype in zip(self.matrices, copies or [None] * len(widths), strict=True)
        ]
        for slot, job in enumerate(jobs):
            weights = torch.Generator().manual_seed(SEED + job.seed)
            for value, grad, exp_avg, exp_avg_sq in self.views(slot):
                value.copy_(torch.randn(value.shape, generator=weights))
                for tensor in (grad, exp_avg, exp_avg_sq):
                    tensor.zero_()
            for value, copy in self.copied(slot):
                copy.copy_(value)
        parts = [
            [
                Rows(matrix, first, rank, copy)
                for matrix, copy, first, rank in zip(
                    self.matrices, self.copies, self.first[slot], job.ranks, strict=True
                )
            ]
            for slot, job in enumerate(jobs)
        ]
        self.work = Work.of(parts, device, chunk=chunk)

    def views(self, slot: int) -> list[tuple[torch.Tensor, ...]]:
        """The job's rows of every matrix that it has."""
        return [
            tuple(tensor[first : first + rank] for tensor in matrix)
            for matrix, first, rank in zip(
                self.matrices, self.first[slot], self.jobs[slot].ranks, strict=True
            )
            if rank
        ]

    def copied(self, slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(value, copy) of every matrix of the job that has one."""
        return [
            (matrix[0][first : first + rank], copy[first : first + rank])
            for matrix, copy, first, rank in zip(
                self.matrices, self.copies, self.first[slot], self.jobs[slot].ranks, strict=True
            )
            if rank and copy is not None
        ]

    def copies_follow(self, slot: int) -> bool:
        """To the bit."""
        return all(torch.equal(copy, value.to(copy.dtype)) for value, copy in self.copied(slot))

    def fill_gradients(self, slot: int, number: int) -> None:
        for (_, grad, _, _), new in zip(
            self.views(slot), gradients(self.jobs[slot], self.widths, number), strict=True
        ):
            grad.copy_(new)

    def tensors(self) -> list[torch.Tensor]:
        """Four of every matrix, and after them the copies."""
        copies = [copy for copy in self.copies if copy is not None]
        return [*(tensor for matrix in self.matrices for tensor in matrix), *copies]

    def copy(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.tensors()]

    def changed_rows(self, before: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of every tensor, which rows have other bits than before."""
        return [
            (tensor.view(torch.uint8) != old.view(torch.uint8)).any(dim=1)
            for tensor, old in zip(self.tensors(), before, strict=True)
        ]

    def owned_rows(self, slots: Sequence[int]) -> list[torch.Tensor]:
        """The rows of these jobs, of every tensor."""
        masks, of_copies = [], []
        for index, matrix in enumerate(self.matrices):
            mask = torch.zeros(len(matrix[0]), dtype=torch.bool, device=self.device)
            for slot in slots:
                first = self.first[slot][index]
                mask[first : first + self.jobs[slot].ranks[index]] = True
            masks += [mask] * 4
            of_copies += [] if self.copies[index] is None else [mask]
        return [*masks, *of_copies]


def gradients(job: Job, widths: Sequence[int], number: int) -> list[torch.Tensor]:
    """Of one step, small or large, of both signs."""
    generator = torch.Generator().manual_seed(SEED + 1000 * job.seed + number)
    return [
        torch.randn(rank, width, generator=generator) * 10.0 ** (number % 3 - 1)
        for rank, width in zip(job.ranks, widths, strict=True)
        if rank
    ]


class Torch:
    """The same job by `torch.optim.AdamW` and `clip_grad_norm_`, in float64."""

    def __init__(self, job: Job, widths: Sequence[int]) -> None:
        self.job, self.widths = job, widths
        weights = torch.Generator().manual_seed(SEED + job.seed)
        self.parameters = [
            torch.nn.Parameter(torch.randn(rank, width, generator=weights).double())
            for rank, width in zip(job.ranks, widths, strict=True)
            if rank
        ]
        self.adamw = torch.optim.AdamW(
            self.parameters, betas=job.betas, eps=job.epsilon, weight_decay=job.decay
        )

    def step(self, number: int) -> float:
        """The norm before clipping. `number` chooses the gradients and the rate."""
        self.adamw.param_groups[0]["lr"] = self.job.rate / number
        new = gradients(self.job, self.widths, number)
        for parameter, grad in zip(self.parameters, new, strict=True):
            parameter.grad = grad.double()
        limit = float("inf") if self.job.max_norm is None else self.job.max_norm
        return float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))

    def finish(self) -> None:
        self.adamw.step()

    def tensors(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        states = [self.adamw.state[parameter] for parameter in self.parameters]
        return [
            (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
            for parameter, state in zip(self.parameters, states, strict=True)
        ]


def worst_error(problem: Problem, slot: int, theirs: Torch) -> float:
    """Relative, over values and moments of all matrices; NaN if any element is."""
    errors = []
    for ours, right in zip(problem.views(slot), theirs.tensors(), strict=True):
        value, _, exp_avg, exp_avg_sq = ours
        for tensor, wanted in zip((value, exp_avg, exp_avg_sq), right, strict=True):
            difference = (tensor.cpu().double() - wanted).norm()
            errors.append(float(difference / wanted.norm().clamp(min=1e-30)))
    return max(errors) if all(error == error for error in errors) else float("nan")
