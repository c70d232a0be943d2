"""What the host does around the kernels when many jobs share a deep model, part by part.

    OMP_NUM_THREADS=1 python benchmarks/host_work.py [--label WORD] [--profile] [--json FILE]

A model of 30 layers and 7 linears each, as SmolLM2 has, but so narrow that only the calls count;
48 jobs of ranks 2, 8 and 32. Nothing is trained: jobs come and go one at a time, and after each the
parts of a sweep are timed in processor time, all threads together. Copies between device and
host take the courier's way through staging buffers, with a device that lies in host memory.

The last line reckons a sweep: every part as often as a fused sweep of 48 trials had it on an H200
(COUNTS). Before it is left, `--profile` prints where the time of one more round goes.
"""

import argparse
import cProfile
import json
import os
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tlora.core.job import DataSpec, JobSpec, LoraSpec, TrainSpec
from tlora.core.sequence import TokenSequence
from tlora.kernels.multi_lora.blocks import Layout, Tiles, build_table
from tlora.kernels.multi_lora.routes import MIN_RANK, MIN_SEGMENTS
from tlora.kernels.multi_lora.tables import Segment
from tlora.model.job_rows import of_weights
from tlora.model.packing import PackedBatch, Share, pack
from tlora.model.snapshot import InBackground
from tlora.model.super_model import SuperModel
from tlora.runtime.benchmark.record import commit
from tlora.training import moving
from tlora.training.engine import Engine
from tlora.training.optimiser import PooledRows

LAYERS = 30
WIDTH = 32
JOBS = 48
RANKS = (2, 8, 32)
TOKENS = 8192
STAGING = 16 << 20

COUNTS = {
    "arrival": 60,
    "attach": 60,
    "detach": 60,
    "work list": 60,
    "snapshot": 192,
    "snapshot read": 60,
    "evaluation end": 173,
    "first entry": 60,
    "entry": 48,
    "tables": 108,
}
"""Of benchmarks/sweep_peft.py with 48 trials of 108 nano-batches; a snapshot is read when its trial
is over. An arrival is done in the background while others train."""


class HostLane:
    def __init__(self, numel: int) -> None:
        self.buffer = torch.empty(numel)

    def read(self, source: torch.Tensor) -> None:
        self.buffer[: len(source)].copy_(source)

    def write(self, target: torch.Tensor) -> None:
        target.copy_(self.buffer[: len(target)])

    def wait(self) -> None:
        pass


class HostLink:
    """A device in host memory, which is never behind."""

    device = torch.device("cpu")

    def enter(self) -> None: ...

    def lanes(self) -> Sequence[HostLane]:
        return [HostLane(STAGING // 4) for _ in range(2)]

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def has_room(self, num_bytes: int) -> bool:
        return True


def deep_model() -> SuperModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    # As on a GPU; nothing is compiled before it runs.
    rows = JOBS * sum(RANKS) // len(RANKS) + 2 * max(RANKS)
    model = SuperModel(LlamaForCausalLM(config), reserve_rows=rows, compiled=True)
    model.adapter_rows.courier = InBackground(HostLink())
    return model


def job_of(number: int) -> JobSpec:
    return JobSpec(
        name=f"job-{number}",
        data=DataSpec(path="in memory"),
        lora=LoraSpec(r=RANKS[number % len(RANKS)], lora_alpha=16.0),
        train=TrainSpec(learning_rate=1e-3, max_steps=1, seed=number),
    )


def batch_of(jobs: Sequence[str]) -> PackedBatch:
    """A sequence of each."""
    length = TOKENS // len(jobs)
    ids = np.ones(length, dtype=np.int32)
    shares = [Share(job, [TokenSequence(ids, ids)], [0], [1.0]) for job in jobs]
    return pack(shares, TOKENS, torch.device("cpu"))


class Parts:
    """Processor time by part, one figure for each time."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in COUNTS}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.process_time()
        yield
        self.seconds[name].append(time.process_time() - started)

    @property
    def milliseconds(self) -> dict[str, float]:
        """Of the quickest: others on the machine make processor time longer, too."""
        return {name: round(1e3 * min(seconds), 3) for name, seconds in self.seconds.items()}


class Day:
    def __init__(self) -> None:
        self.model = deep_model()
        self.engine = Engine(self.model, budget_tokens=TOKENS, bucket_step=TOKENS)
        self.rows = PooledRows(self.model)
        self.held_out = [TokenSequence(np.ones(4, dtype=np.int32), np.ones(4, dtype=np.int32))]
        self.comes = 0
        while self.comes < JOBS:
            self._attach(self._next())

    def _next(self) -> JobSpec:
        self.comes += 1
        return job_of(self.comes - 1)

    def _attach(self, job: JobSpec, parts: Parts | None = None) -> None:
        weights = self.model.new_adapter(job)
        parts = parts or Parts()
        with parts.timed("arrival"):
            there = moving.bring_weights(self.model, job.name, weights).result()
            berth = self.model.keep_rows(job.name, there)
        with parts.timed("attach"):
            self.engine.attach(job.name, there, scale=job.lora.scale, seed=job.train.seed)
        del berth

    def round(self, parts: Parts) -> None:
        """One trial leaves, another comes, four are evaluated and kept, two nano-batches run."""
        with parts.timed("detach"):
            self.engine.detach(self.engine.jobs[0])
        self._attach(self._next(), parts)
        with parts.timed("work list"):
            self.rows.work()
        names = self.engine.jobs
        for number in range(4):
            name = names[(7 * self.comes + number) % len(names)]
            self.engine.evaluate(name, self.held_out)
            job = self.engine._jobs[name]
            with parts.timed("evaluation end"):
                self.engine._finish_evaluation(job)
            with parts.timed("snapshot"):
                snapshot = self.model.snapshot(name, of_weights)
                self.model.adapter_rows.courier._out.submit(lambda: None).result()  # type: ignore[attr-defined]
            with parts.timed("snapshot read"):
                snapshot.result()
        batch = batch_of(names)
        for name in ("first entry", "entry"):
            with parts.timed(name), torch.no_grad(), self.model.routed(batch, train=False):
                pass
            with parts.timed("tables"):
                self.tables(batch)

    def tables(self, batch: PackedBatch) -> None:
        """The work lists of a nano-batch: one for each kind of group in a layer."""
        for pool in self.model.pools[:4]:
            layout = Layout(
                num_tokens=TOKENS,
                in_features=pool.targets[0].in_features,
                out_features=tuple(target.out_features for target in pool.targets),
                max_segments=MIN_SEGMENTS,
                max_rank=MIN_RANK,
                dropout=False,
                tiles=Tiles.for_tokens(TOKENS),
            )
            segments = [
                Segment(
                    each.start, each.stop, slot.a_row, slot.ranks, slot.b_rows, 2.0, key=each.key
                )
                for each in batch.segments
                for slot in (pool.slots[each.job],)
            ]
            build_table(layout, segments)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--label", default="")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    day, parts = Day(), Parts()
    day.round(Parts())
    for _ in range(options.rounds):
        day.round(parts)
    if options.profile:
        with cProfile.Profile() as profile:
            day.round(Parts())
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    found = parts.milliseconds
    print(f"{'part':<16} {'ms':>8} {'times':>6} {'s':>7}")
    for name, each in found.items():
        print(f"{name:<16} {each:8.2f} {COUNTS[name]:6} {each * COUNTS[name] / 1e3:7.2f}")
    total = sum(each * COUNTS[name] for name, each in found.items()) / 1e3
    print(f"{'a sweep':<16} {'':8} {'':6} {total:7.2f}")
    line = {
        "v": 1,
        "kind": "host_work",
        "command": " ".join(sys.argv),
        "commit": commit(),
        "label": options.label,
        "jobs": JOBS,
        "layers": LAYERS,
        "rounds": options.rounds,
        "parts_ms": found,
        "sweep_s": round(total, 3),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "unix_s": round(time.time()),
    }
    if options.json:
        with options.json.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
