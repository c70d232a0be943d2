"""The control element: before each nano-batch all ranks agree on what comes next.

A few integers, reduced by MAX over all ranks: one small collective, the same for every plan. What
each place means is chosen so that the largest is what everybody must do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

import torch
import torch.distributed as dist

from tlora.parallel.counting import Counts, Purpose


class Pass(Enum):
    """Of a nano-batch through the backbone: what the ranks that share it must do alike."""

    FORWARD = "forward"
    TRAIN = "train"
    """Forward and backward."""


class Standing(IntEnum):
    """Of a job that spans ranks and its current batch, as one rank sees it; the largest counts."""

    OVER = 0
    """The job has come to its end on this rank: it leaves once all say so."""

    READY = 1
    """Through on this rank: the job may step, or its evaluation end, once all say so."""

    BUSY = 2
    REPLAY = 3
    """A nano-batch of it broke off: all ranks drop what they have of the batch and run it again."""

    LEAVE = 4
    """It cannot go on here, and so nowhere."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Of one rank."""

    alive: bool = False
    """It has jobs, or results to report."""

    stop: bool = False
    """Somebody asked it to stop."""

    broke_off: bool = False
    """Its last pass failed."""

    drift: bool = False
    """It thinks that jobs should come, go or be moved: all ranks meet to do it."""

    crowded: bool = False
    """Its last pass had no room: layers that stay gathered should be fewer."""

    rows: tuple[int, int] = (0, 0)
    """Of the nano-batch that it could run, by pass: forward, train; 0 for none."""

    budget: int = 0
    """Tokens of nano-batches from now on, by the rank that measures them; 0 elsewhere."""

    unfit_rows: int = 0
    """Of a nano-batch that did not fit memory here since the last agreement; 0 for none."""

    standings: tuple[Standing, ...] = ()
    """Of the jobs that span ranks, in the order that all ranks attached them."""

    away: tuple[bool, ...] = ()
    """Of jobs on their way into the group, in the order that all ranks heard of them: whether this
    rank still waits for one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The same on all ranks."""

    over: bool
    broke_off: bool
    drift: bool
    crowded: bool
    kind: Pass | None
    """None if no rank has anything to run; steps may be due."""

    rows: int
    """Of the largest nano-batch that is run now."""

    budget: int
    """Of nano-batches from now on; 0 if each rank keeps its own."""

    unfit_rows: int
    """Of the largest nano-batch that did not fit on some rank; 0 for none."""

    standings: tuple[Standing, ...]
    away: tuple[bool, ...]
    """Whether some rank still waits for a job on its way."""


def encoded(wish: Wish) -> list[int]:
    flags = (wish.alive, wish.stop, wish.broke_off, wish.drift, wish.crowded)
    figures = (*wish.rows, wish.budget, wish.unfit_rows)
    return [*map(int, flags), *figures, *wish.standings, *map(int, wish.away)]


def judge(reduced: Sequence[int], last: Pass | None, *, coming: int = 0) -> Verdict:
    """`coming`: jobs on their way. Where some ranks would train and others run forward, they take
    turns: no job waits for ever."""
    alive, stop, broke_off, drift, crowded, *figures = reduced
    forward, train, budget, unfit_rows, *of_jobs = figures
    attached = len(of_jobs) - coming
    kind = None
    if forward and train:
        kind = Pass.TRAIN if last is Pass.FORWARD else Pass.FORWARD
    elif forward or train:
        kind = Pass.TRAIN if train else Pass.FORWARD
    return Verdict(
        over=bool(stop) or not alive,
        broke_off=bool(broke_off),
        drift=bool(drift),
        crowded=bool(crowded),
        kind=kind,
        rows=0 if kind is None else (train if kind is Pass.TRAIN else forward),
        budget=budget,
        unfit_rows=unfit_rows,
        standings=tuple(map(Standing, of_jobs[:attached])),
        away=tuple(map(bool, of_jobs[attached:])),
    )


class LockStep:
    """The ranks of a group, one agreement after another."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self._last: Pass | None = None
        # On the host, where it is read: a device would have to be waited for. Under nccl the same
        # group has a gloo side for this.
        self._group = dist.group.WORLD

    def agree(self, wish: Wish) -> Verdict:
        element = torch.tensor(encoded(wish), dtype=torch.int64)
        dist.all_reduce(element, op=dist.ReduceOp.MAX, group=self._group)
        self.counts.add(Purpose.CONTROL, element.numel() * element.element_size())
        verdict = judge(element.tolist(), self._last, coming=len(wish.away))
        self._last = verdict.kind or self._last
        return verdict
