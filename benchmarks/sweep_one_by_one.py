"""The trials of sweep_trials.py by PEFT, one after another."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from sweep_trials import Clock, Seconds, Sweep, kind_of

from tlora.core.job import JobSpec
from tlora.core.sequence import IGNORED, TokenSequence
from tlora.data.cursor import Cursor, next_batch
from tlora.runtime.benchmark.peft_arm import PeftJob, PeftJobs, padded_inputs
from tlora.training.learning_rate import learning_rate

EVALUATED_AT_ONCE = 16
"""Held-out rows in one of PEFT's forward passes."""

MARGIN = 1.1
"""Of the time that a trial of PEFT is expected to take."""


@dataclass
class OneByOne:
    """What PEFT took, trial by trial."""

    train: dict[str, Seconds] = field(default_factory=dict)
    evaluate: dict[str, Seconds] = field(default_factory=dict)
    best_losses: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    def seconds(self, jobs: Sequence[JobSpec]) -> Seconds:
        """Of all trials: those that were not run take what others of their rank and batch size
        took."""
        kinds: dict[tuple[int, int], list[Seconds]] = {}
        for job in jobs:
            if job.name in self.train:
                both = self.train[job.name] + self.evaluate[job.name]
                kinds.setdefault(kind_of(job), []).append(both)
        total = Seconds()
        for job in jobs:
            if job.name in self.train:
                total += self.train[job.name] + self.evaluate[job.name]
            else:
                seen = kinds[kind_of(job)]
                total += Seconds(
                    statistics.mean(each.wall for each in seen),
                    statistics.mean(each.cpu for each in seen),
                )
        return total


def one_by_one(sweep: Sweep, peft: PeftJobs, has_time: Callable[[float], bool]) -> OneByOne:
    """One of every rank and batch size, whatever it takes, and as many more as there is time
    for."""
    found, expected = OneByOne(), dict[tuple[int, int], float]()
    for job in sweep.jobs:
        if kind_of(job) in expected and not has_time(MARGIN * expected[kind_of(job)]):
            break
        train_trial(sweep, job, peft, found)
        took = found.train[job.name] + found.evaluate[job.name]
        expected[kind_of(job)] = took.wall
    return found


def train_trial(sweep: Sweep, job: JobSpec, peft: PeftJobs, found: OneByOne) -> None:
    device, steps = peft.base.device, sweep.steps(job)
    train, evaluate, losses = Seconds(), Seconds(), list[float]()
    clock = Clock(device)
    adapted = peft.start(job)
    cursor = Cursor()
    # As ours, which is evaluated before its first step, too.
    train += clock.read()
    clock = Clock(device)
    evaluated(adapted, sweep.evaluation)
    evaluate += clock.read()
    clock = Clock(device)
    for step in range(1, steps + 1):
        indices, cursor = next_batch(cursor, len(sweep.train), job.train.batch_size, job.train.seed)
        batch = [sweep.train[int(index)] for index in indices]
        assert adapted.optimiser is not None
        for group in adapted.optimiser.param_groups:
            group["lr"] = learning_rate(job.train, step - 1, steps)
        adapted.step(batch, packed=False)
        found.tokens += sum(map(len, batch))
        if step % (job.eval.steps or steps) == 0 or step == steps:
            train += clock.read()
            clock = Clock(device)
            losses.append(evaluated(adapted, sweep.evaluation))
            evaluate += clock.read()
            if not math.isfinite(losses[-1]):
                break
            clock = Clock(device)
    adapted.stop()
    found.train[job.name], found.evaluate[job.name] = train, evaluate
    if losses and all(map(math.isfinite, losses)):
        found.best_losses[job.name] = min(losses)


@torch.no_grad()
def evaluated(adapted: PeftJob, rows: Sequence[TokenSequence]) -> float:
    """Mean loss per trained token, of rows of like lengths together."""
    ordered = sorted(rows, key=len)
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for start in range(0, len(ordered), EVALUATED_AT_ONCE):
        batch = ordered[start : start + EVALUATED_AT_ONCE]
        inputs = padded_inputs(batch)
        count = int((inputs["labels"][:, 1:] != IGNORED).sum())
        total += adapted.loss(inputs).double().cpu() * count
        targets += count
    return float(total / targets)
