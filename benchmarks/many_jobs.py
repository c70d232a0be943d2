"""What many small jobs in one file cost: `python benchmarks/many_jobs.py OUT.yaml [--run DIR]`.

Writes a job file on the demo base whose jobs share eight datasets and differ in rank, targets,
batch size, rate, split and seed; with `--run` it is trained as `tlora train` would, in plain lines,
and what was spent on what is printed in processor seconds of this process. docs/report.md has
figures.
"""

import argparse
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import yaml

from tlora.core.assets import DEMO

RANKS = (2, 4, 8, 16, 32, 6, 12)
BATCH_SIZES = (1, 2, 4, 8, 3)
RATES = (1e-3, 3e-3, 5e-3)
TARGETS = ("all-linear", ["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"])
SPLITS = (24, 0.1)
COLUMNS = {"sql": {"prompt": "question", "completion": "query"}}


def job(number: int, dataset: str, steps: int) -> dict[str, object]:
    data: dict[str, object] = {"path": str(DEMO / "data" / f"{dataset}.jsonl")}
    if dataset in COLUMNS:
        data["columns"] = COLUMNS[dataset]
    return {
        "name": f"{dataset}-{number:03d}",
        "data": data,
        "lora": {
            "r": RANKS[number % len(RANKS)],
            "lora_alpha": 16,
            "lora_dropout": 0.05 * (number % 3),
            "target_modules": TARGETS[number % len(TARGETS)],
        },
        "train": {
            "learning_rate": RATES[number % len(RATES)],
            "batch_size": BATCH_SIZES[number % len(BATCH_SIZES)],
            "max_steps": steps,
            "max_length": 128,
            "seed": number,
        },
        "eval": {"split": SPLITS[number % len(SPLITS)], "steps": max(1, steps // 2)},
    }


def job_file(jobs: int, steps: int) -> dict[str, object]:
    datasets = cycle(sorted(path.stem for path in (DEMO / "data").glob("*.jsonl")))
    return {
        "base": {"model": str(DEMO / "base")},
        "engine": {"device": "cpu"},
        "jobs": [job(i, dataset, steps) for i, dataset in enumerate(islice(datasets, jobs))],
    }


class Spent:
    """Processor time inside some methods."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def watch(self, owner: type, method: str, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return real(*arguments, **named)
            finally:
                self.seconds[name] += time.process_time() - began
                self.calls[name] += 1

        setattr(owner, method, timed)


def measure(file: Path, output: Path) -> None:
    from tlora.config import load_spec

    imported = time.process_time()
    spec = load_spec(file)
    read = time.process_time()

    from tlora.runtime.progress import ProgressLines
    from tlora.runtime.recording import Recorder
    from tlora.runtime.training import train
    from tlora.training.engine import Engine

    loaded, bytes_loaded = time.process_time(), peak_bytes()
    spent = Spent()
    spent.watch(Engine, "_run", "forward and backward")
    spent.watch(Engine, "_compose", "composing")
    spent.watch(Engine, "_step", "optimiser steps")
    spent.watch(Recorder, "_export", "adapters looked at")
    started: list[tuple[float, int]] = []

    class Watched(ProgressLines):
        def start(self, drivers: list[Any], budget_tokens: int) -> None:
            super().start(drivers, budget_tokens)
            started.append((time.process_time(), peak_bytes()))

    train(spec, output=output, fresh=True, progress=Watched())
    (began, bytes_began), ended = started[0], time.process_time()
    passes = spent.calls["forward and backward"]
    rest = ended - began - sum(spent.seconds.values())
    print(f"importing torch and transformers    {imported + loaded - read:8.2f} s")
    print(f"reading the job file                {read - imported:8.2f} s")
    print(f"data, model, attaching              {began - loaded:8.2f} s")
    print(f"training and ending                 {ended - began:8.2f} s, {passes} nano-batches")
    for name, seconds in [*spent.seconds.items(), ("all else", rest)]:
        print(f"  {name:<33} {seconds:8.2f} s, {1e3 * seconds / passes:6.2f} ms a nano-batch")
    sizes = [f"{size / 2**20:.0f}" for size in (bytes_loaded, bytes_began, peak_bytes())]
    print("memory after the imports, at the start of training, at most (MiB):", *sizes)
    files = [path for path in output.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    print(f"disk: {size / 2**20:.1f} MiB in {len(files)} files, report.html ", end="")
    print(f"{(output / 'report.html').stat().st_size / 2**20:.2f} MiB")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the job file")
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--run", type=Path, metavar="DIR", help="train it there, and measure")
    arguments = parser.parse_args()
    text = yaml.safe_dump(job_file(arguments.jobs, arguments.steps), sort_keys=False)
    arguments.out.write_text(text, encoding="utf-8")
    if arguments.run is not None:
        measure(arguments.out, arguments.run)


if __name__ == "__main__":
    main()
