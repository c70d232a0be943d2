"""What holding the base in fewer bits does to jobs that learn on it.

    python benchmarks/quantised_quality.py --model SmolLM2-135M --data DATASETS --json FILE

The same jobs, several seeds of each, are trained in one fused run on the base in full, in FP8 and
in NF4. Held-out losses before the first step say what the base lost, those at the end what is left
of that after training. Seeds differ in the start of the adapter and the order of rows; how far
their held-out losses lie apart is what a difference between two bases has to be compared with.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from bf16_noise import JOBS, Bench, Curve, Job, read_jobs
from figures import Figures, compiles, figures, options

from tlora.core.job import BaseSpec
from tlora.model.loading import load_base
from tlora.model.super_model import SuperModel

WAYS = ("none", "fp8", "nf4")


def seeded(job: Job, seed: int) -> Job:
    spec = job.spec
    train = replace(spec.train, seed=1000 * seed + spec.train.seed)
    return replace(job, spec=replace(spec, name=f"{spec.name}-{seed}", train=train))


def of_dataset(curves: dict[str, Curve], dataset: str) -> list[Curve]:
    """One a seed."""
    return [curve for name, curve in curves.items() if name.rpartition("-")[0] == dataset]


def compare(curves: dict[str, dict[str, Curve]], datasets: Sequence[str], found: Figures) -> None:
    """All that is known by now, as a table and for the line."""
    rows: list[list[object]] = []
    kept: dict[str, dict[str, dict[str, float]]] = {}
    for dataset in datasets:
        full = [curve.held_out[-1] for curve in of_dataset(curves["none"], dataset)]
        for way, of_way in curves.items():
            same = of_dataset(of_way, dataset)
            before = statistics.mean(curve.held_out[0] for curve in same)
            after = [curve.held_out[-1] for curve in same]
            # Seed by seed: what seeds differ by among themselves is in both.
            lost = statistics.mean(ours - theirs for ours, theirs in zip(after, full, strict=True))
            of_seeds = max(after) - min(after)
            rows.append([dataset, way, before, statistics.mean(after), lost, of_seeds])
            kept.setdefault(dataset, {})[way] = {
                "before": round(before, 5),
                "after": round(statistics.mean(after), 5),
                "worse_than_full": round(lost, 5),
                "seeds_apart": round(of_seeds, 5),
            }
    head = ["job", "base", "held out before", "after", "worse than in full by", "seeds apart"]
    found.table(head, rows)
    found.values["held_out"] = kept


def measure(given, jobs: Sequence[Job], found: Figures) -> None:
    device = torch.device(given.device)
    datasets = given.jobs.split(",")
    curves: dict[str, dict[str, Curve]] = {}
    seconds: dict[str, float] = {}
    found.values["run_seconds"] = seconds
    for way in given.ways.split(","):
        base = load_base(BaseSpec(model=given.model, dtype=given.dtype, quantization=way), device)
        rows = sum(job.spec.lora.r for job in jobs)
        model = SuperModel(base, reserve_rows=rows, compiled=compiles(given))
        before = found.left
        watcher = Bench(model, list(jobs), given.budget).run(jobs)
        seconds[way] = round(before - found.left, 1)
        curves[way] = watcher.curves
        found.say(f"{way}: {seconds[way]:.1f} s, {watcher.nano_batches} nano-batches")
        found.values["curves"] = {
            each: {name: [round(loss, 5) for loss in curve.losses] for name, curve in of.items()}
            for each, of in curves.items()
        }
        compare(curves, datasets, found)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, seconds=3600)
    parser.add_argument("--model", required=True, help="a Hugging Face checkpoint's directory")
    parser.add_argument("--data", type=Path, required=True, help="folder of NAME.jsonl.gz")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a nano-batch")
    parser.add_argument("--length", type=int, default=512, help="longest sequence")
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--jobs", default=",".join(name for name, *_ in JOBS))
    parser.add_argument("--ways", default=",".join(WAYS), help="the base in full comes first")
    given = parser.parse_args(arguments)
    if given.ways.split(",")[0] != "none":
        parser.error("--ways: the others are compared with 'none', which comes first")
    with figures("quantised_quality", given) as found:
        read = read_jobs(
            given.model, given.data, given.jobs.split(","), given.steps, given.length, given.rate
        )
        jobs = [seeded(job, seed) for job in read for seed in range(given.seeds)]
        asked = ("steps", "seeds", "budget", "length", "rate", "dtype")
        found.values["settings"] = {
            "model": Path(given.model).name,
            **{key: getattr(given, key) for key in asked},
            "jobs": {
                job.spec.name: {"rank": job.spec.lora.r, "batch": job.spec.train.batch_size}
                for job in read
            },
            "held_out_rows": {job.spec.name: len(job.evaluation) for job in read},
        }
        measure(given, jobs, found)


if __name__ == "__main__":
    main(sys.argv[1:])
