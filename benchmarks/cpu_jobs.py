"""Eight small jobs on a CPU: together, one at a time in the same engine, and one by one with PEFT.

    python benchmarks/cpu_jobs.py [--threads 2] [--repeats 5] [--json FILE]

All three do the same work: the same optimiser steps over the same sequences of the demo base, so
the ratios of their times are the ratios of useful tokens per second. Rounds are interleaved and the
median is taken. PEFT gets a warm process, a base that is loaded once, length-sorted batches and the
better of padded and packed batches. Prints a table, then one JSON line.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from tlora.core.job import DataSpec, JobSpec, LoraSpec, TrainSpec
from tlora.core.sequence import TokenSequence
from tlora.model.super_model import SuperModel
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine
from tlora.training.loop import run_jobs
from tlora.training.outcome import EvaluationDone, Outcome, StepDone

HERE = Path(__file__).parent
BASE = HERE.parent / "tlora" / "assets" / "demo" / "base"
LENGTHS = HERE / "lengths" / "short_mixed.txt"
RANKS = (4, 8, 16, 32)
BATCHES = (1, 2, 4)


@dataclass(frozen=True)
class Workload:
    jobs: list[JobSpec]
    rows: dict[str, list[TokenSequence]]

    @property
    def tokens(self) -> int:
        """Useful tokens of all steps of all jobs; every job passes its rows once."""
        return sum(len(row) for rows in self.rows.values() for row in rows)


def workload(num_jobs: int, steps: int, vocabulary: int, dropout: float) -> Workload:
    lengths = [int(line) for line in LENGTHS.read_text().split()]
    generator = np.random.default_rng(0)
    jobs, rows = [], {}
    for i in range(num_jobs):
        batch = BATCHES[i % len(BATCHES)]
        job = JobSpec(
            name=f"job-{i}",
            data=DataSpec(path="random tokens"),
            lora=LoraSpec(r=RANKS[i % len(RANKS)], lora_alpha=32.0, lora_dropout=dropout),
            train=TrainSpec(batch_size=batch, max_steps=steps, learning_rate=1e-3, seed=i),
        )
        jobs.append(job)
        rows[job.name] = []
        for _ in range(batch * steps):
            ids = generator.integers(3, vocabulary, int(generator.choice(lengths))).astype(np.int32)
            rows[job.name].append(TokenSequence(ids, ids))
    return Workload(jobs, rows)


class Stopwatch:
    """Seconds inside nano-batches, to tell the engine's own work from the model's."""

    def __init__(self) -> None:
        self.tokens = self.rows = self.nano_batches = 0

    def on_nano_batch(self, outcome: Outcome) -> None:
        self.tokens += sum(outcome.tokens.values())
        self.rows += outcome.rows
        self.nano_batches += 1

    def on_step(self, driver: JobDriver, done: StepDone) -> None: ...

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None: ...

    def on_end(self, driver: JobDriver) -> None: ...


def run_tlora(model: SuperModel, work: Workload, jobs: list[JobSpec], budget: int) -> float:
    engine = Engine(model, budget_tokens=budget)
    watch = Stopwatch()
    started = time.perf_counter()
    drivers = []
    for job in jobs:
        driver = JobDriver(job, work.rows[job.name])
        driver.attach(engine, model.new_adapter(job))
        drivers.append(driver)
    run_jobs(engine, drivers, watch)
    seconds = time.perf_counter() - started
    assert watch.tokens == sum(len(row) for job in jobs for row in work.rows[job.name])
    return seconds


def run_peft(base: torch.nn.Module, work: Workload, *, packed: bool) -> float:
    """Every job after the other; setting the adapter up counts, as it does for us."""
    from peft import LoraConfig, get_peft_model

    started = time.perf_counter()
    for job in work.jobs:
        config = LoraConfig(
            r=job.lora.r,
            lora_alpha=int(job.lora.lora_alpha),
            lora_dropout=job.lora.lora_dropout,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(base, config)
        model.train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimiser = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0, fused=True)
        rows = sorted(work.rows[job.name], key=len)
        for start in range(0, len(rows), job.train.batch_size):
            batch = rows[start : start + job.train.batch_size]
            inputs = packed_inputs(batch) if packed else padded_inputs(batch)
            model(**inputs).loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            optimiser.zero_grad()
        base = model.unload()
    return time.perf_counter() - started


def padded_inputs(batch: list[TokenSequence]) -> dict[str, torch.Tensor]:
    longest = max(len(row) for row in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    labels = torch.full((len(batch), longest), -100)
    for i, row in enumerate(batch):
        ids[i, : len(row)] = torch.from_numpy(row.input_ids)
        labels[i, : len(row)] = torch.from_numpy(row.labels)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


def packed_inputs(batch: list[TokenSequence]) -> dict[str, torch.Tensor]:
    ids = torch.from_numpy(np.concatenate([row.input_ids for row in batch])).long()
    labels = ids.clone()
    starts = np.cumsum([0, *(len(row) for row in batch)])[:-1]
    labels[torch.from_numpy(starts)] = -100
    positions = torch.cat([torch.arange(len(row)) for row in batch])
    return {"input_ids": ids[None], "labels": labels[None], "position_ids": positions[None]}


def commit() -> str:
    command = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(settings.threads)

    def load():
        return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)

    base = load()
    work = workload(settings.jobs, settings.steps, base.config.vocab_size, settings.dropout)
    model = SuperModel(load(), reserve_rows=256)
    arms = {
        "fused": lambda: run_tlora(model, work, work.jobs, settings.budget),
        "one at a time": lambda: sum(
            run_tlora(model, work, [job], settings.budget) for job in work.jobs
        ),
        "PEFT padded": lambda: run_peft(base, work, packed=False),
        "PEFT packed": lambda: run_peft(base, work, packed=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for round_number in range(settings.repeats + 1):
        for name, run in arms.items():
            measured = run()
            # The first round warms up.
            if round_number:
                seconds[name].append(measured)
    rates = {name: work.tokens / statistics.median(values) for name, values in seconds.items()}
    spread = {name: (max(v) - min(v)) / statistics.median(v) * 100 for name, v in seconds.items()}
    peft = max(rates["PEFT padded"], rates["PEFT packed"])
    print(f"{work.tokens:,} useful tokens, {settings.jobs} jobs, {settings.threads} threads")
    for name in arms:
        print(f"{name:>14}  {rates[name]:9,.0f} tokens/s  (spread {spread[name]:.0f} %)")
    print(f"fused / best PEFT one by one  {rates['fused'] / peft:.2f}x")
    print(f"fused / one at a time         {rates['fused'] / rates['one at a time']:.2f}x")
    line = {
        "v": 1,
        "kind": "bench",
        "commit": commit(),
        "command": " ".join(["python", "benchmarks/cpu_jobs.py", *sys.argv[1:]]),
        "device": f"cpu, {settings.threads} threads",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "shape": "demo",
        "settings": {
            "jobs": settings.jobs,
            "ranks": RANKS,
            "batch": BATCHES,
            "lengths": LENGTHS.name,
            "steps": settings.steps,
            "dropout": settings.dropout,
            "nano_batch_tokens": settings.budget,
        },
        "fused": {"tokens_per_s": round(rates["fused"], 1)},
        "one_at_a_time": {"tokens_per_s": round(rates["one at a time"], 1)},
        "peft_one_by_one": {
            "tokens_per_s": round(peft, 1),
            "padded": round(rates["PEFT padded"], 1),
            "packed": round(rates["PEFT packed"], 1),
        },
        "ratio_peft": round(rates["fused"] / peft, 3),
        "repeats": settings.repeats,
        "noise_pct": round(max(spread.values()), 1),
    }
    print(json.dumps(line))
    if settings.json:
        settings.json.write_text(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
