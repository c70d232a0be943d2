"""Writes a job file with many small jobs on the demo base: `python benchmarks/many_jobs.py OUT`.

For looking at what many jobs in one file cost to start, to watch and to end: they share eight
datasets and differ in rank, targets, batch size, rate, split and seed. docs/report.md has figures.
"""

import argparse
from itertools import cycle, islice
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the job file")
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    text = yaml.safe_dump(job_file(arguments.jobs, arguments.steps), sort_keys=False)
    arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
