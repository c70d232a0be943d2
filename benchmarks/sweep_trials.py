"""The trials of the sweeps that sweep_peft.py compares, and what a clock says of them."""

import argparse
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from bf16_noise import in_memory
from transformers import AutoTokenizer

from tlora.core.job import DataSpec, EvalSpec, JobSpec, LoraSpec, TrainSpec
from tlora.core.sequence import TokenSequence
from tlora.data.cursor import total_steps
from tlora.data.dataset import TokenDataset
from tlora.data.prepare import Preparer
from tlora.runtime.benchmark.machine import now
from tlora.tuning.events import TrialPlan

LOWEST, HIGHEST = 1e-5, 1.0
RANKS = (2, 8, 32)
BATCHES = (4, 16)
ALPHA = 16.0
EVALUATIONS = 10
HELD_OUT = 16
HELD_OUT_OF = 320
"""Rows that held-out ones are taken from, since those that are too long are left out."""


@dataclass(frozen=True)
class Sweep:
    """The trials of one dataset, each learning rate's together, and what they learn from."""

    name: str
    jobs: list[JobSpec]
    train: list[TokenSequence]
    evaluation: list[TokenSequence]

    def steps(self, job: JobSpec) -> int:
        train = job.train
        return total_steps(
            len(self.train), train.batch_size, train.num_train_epochs, train.max_steps
        )

    def plan(self, job: JobSpec) -> TrialPlan:
        tokens = sum(map(len, self.train)) * job.train.num_train_epochs
        return TrialPlan(
            name=job.name,
            params={"train.learning_rate": job.train.learning_rate, "lora.r": job.lora.r},
            total_steps=self.steps(job),
            total_tokens=round(tokens),
            batch_size=job.train.batch_size,
            adapter_bytes=0.0,
        )


def read_sweep(name: str, given: argparse.Namespace) -> Sweep:
    with tempfile.TemporaryDirectory() as cache:
        preparer = Preparer(AutoTokenizer.from_pretrained(given.model), cache_dir=Path(cache))
        task = JobSpec(
            name=name,
            data=DataSpec(path=str(given.data / f"{name}.jsonl.gz")),
            lora=LoraSpec(r=RANKS[0], lora_alpha=ALPHA),
            train=TrainSpec(
                num_train_epochs=given.epochs, max_length=given.length, over_length="drop"
            ),
            eval=EvalSpec(split=HELD_OUT_OF),
        )
        prepared = preparer.prepare(task)
        assert isinstance(prepared.train, TokenDataset)
        assert isinstance(prepared.evaluation, TokenDataset)
        # In memory: the files are gone with the folder.
        train = in_memory(prepared.train)[: given.rows]
        sweep = Sweep(name, [], train, in_memory(prepared.evaluation)[:HELD_OUT])
    shares = [at / (given.rates - 1) for at in range(given.rates)]
    rates = [LOWEST * (HIGHEST / LOWEST) ** share for share in shares]
    for at, (rate, rank, batch) in enumerate(product(rates, RANKS, BATCHES)):
        trained = replace(task.train, learning_rate=rate, batch_size=batch)
        lora = replace(task.lora, r=rank)
        job = replace(task, name=f"{name}-{at:02}", lora=lora, train=trained)
        every = max(1, sweep.steps(job) // EVALUATIONS)
        sweep.jobs.append(replace(job, eval=replace(job.eval, steps=every)))
    return sweep


def kind_of(job: JobSpec) -> tuple[int, int]:
    return job.lora.r, job.train.batch_size


@dataclass
class Seconds:
    wall: float = 0.0
    cpu: float = 0.0
    """Of this process: on a machine that others use, too, the better measure on one thread."""

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)

    def as_json(self) -> dict[str, float]:
        return {"wall_s": round(self.wall, 3), "cpu_s": round(self.cpu, 3)}


class Clock:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.started = now(device)
        self.cpu = time.process_time()

    def read(self) -> Seconds:
        return Seconds(now(self.device) - self.started, time.process_time() - self.cpu)
