"""Whether a job in a fused half-precision run follows the curve it follows alone, within noise that
is measured; and whether eight jobs on eight real datasets each learn.

    python benchmarks/bf16_noise.py --model SmolLM2-135M --data DATASETS --json FILE

One job is trained alone several times. The runs differ in nothing but rounding: once more as it
was; the sequences of a batch in the other order; batches cut into small nano-batches; nano-batches
padded to the fused size; the start moved by one bit of float32. How far their loss curves lie apart
is the noise. The same job in a fused run of eight must lie no further from them than they from each
other, and two broken twins must: one whose scale is off by two per cent, and one into whose
weights a neighbour leaks one per cent of its own at every step.

Distances of two curves: the largest and the root mean square of the differences step by step, the
mean of their signs kept (a drift, however small), and the difference of the final held-out losses.
"""

import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import Figures, compiles, figures, options
from transformers import AutoTokenizer

from tlora.core.job import BaseSpec, DataSpec, EvalSpec, JobSpec, LoraSpec, TrainSpec
from tlora.core.sequence import TokenSequence
from tlora.data.dataset import TokenDataset
from tlora.data.prepare import Preparer
from tlora.model.adapters import AdapterWeights, LoraPair
from tlora.model.loading import load_base
from tlora.model.super_model import SuperModel
from tlora.training.driver import JobDriver, Status
from tlora.training.engine import Engine
from tlora.training.loop import run_jobs
from tlora.training.outcome import EvaluationDone, Outcome, StepDone

# (dataset, rank, batch size): different jobs; the first is the one that is watched.
JOBS = (
    ("gsm8k", 16, 4),
    ("nl2bash", 16, 8),
    ("commonsense_mc", 8, 8),
    ("gpteacher_roleplay", 64, 4),
    ("spider_dev", 32, 4),
    ("humaneval", 8, 2),
    ("medquad", 24, 4),
    ("pubmedqa", 5, 2),
)
WRONG_SCALE = 1.02
LEAK = 0.01
METRICS = ("max", "rms", "drift", "held_out")


@dataclass
class Curve:
    """One job in one run."""

    losses: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)


class Watcher:
    """Keeps curves; `after_step` may meddle, for a twin that is to be found out."""

    def __init__(self, after_step: Callable[[str], None] | None = None) -> None:
        self.curves: dict[str, Curve] = {}
        self.nano_batches = 0
        self.after_step = after_step

    def curve(self, name: str) -> Curve:
        return self.curves.setdefault(name, Curve())

    def on_nano_batch(self, outcome: Outcome) -> None:
        assert outcome.error is None, outcome.error
        self.nano_batches += 1

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        self.curve(driver.name).losses.append(done.loss)
        if self.after_step is not None:
            self.after_step(driver.name)

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        self.curve(driver.name).held_out.append(done.loss)

    def on_end(self, driver: JobDriver) -> None:
        assert driver.status is Status.COMPLETED, f"{driver.name}: {driver.reason}"


class OtherWayRound(Engine):
    """The sequences of every batch in the other order: the same sums in another order."""

    def feed(self, name: str, sequences: list[TokenSequence], **options: Any) -> None:
        super().feed(name, sequences[::-1], **options)


@dataclass(frozen=True)
class Job:
    spec: JobSpec
    train: list[TokenSequence]
    evaluation: list[TokenSequence]


@dataclass
class Bench:
    model: SuperModel
    jobs: list[Job]
    budget: int

    def run(
        self,
        jobs: Sequence[Job],
        *,
        engine: type[Engine] = Engine,
        budget: int | None = None,
        bucket_step: int | None = None,
        start: Callable[[AdapterWeights], AdapterWeights] = lambda weights: weights,
        after_step: Callable[[str], None] | None = None,
    ) -> Watcher:
        # Few sizes: a device compiles for each.
        running = engine(
            self.model,
            budget_tokens=budget or self.budget,
            bucket_step=bucket_step or self.budget // 4,
        )
        drivers = [JobDriver(job.spec, job.train, job.evaluation) for job in jobs]
        for driver in drivers:
            driver.attach(running, start(self.model.new_adapter(driver.spec)))
        watcher = Watcher(after_step)
        try:
            run_jobs(running, drivers, watcher)
        finally:
            for name in list(running.jobs):
                running.detach(name)
        return watcher

    def leak(self, victim: str, neighbour: str) -> Callable[[str], None]:
        """Some of the neighbour's weights come into the victim's at each of its steps."""

        def after_step(name: str) -> None:
            if name != victim or neighbour not in self.model.jobs:
                return
            others = self.model.views(neighbour)
            with torch.no_grad():
                for key, rows in self.model.views(victim).items():
                    if others[key].value.shape == rows.value.shape:
                        rows.value.add_(others[key].value, alpha=LEAK)

        return after_step


def by_one_bit(weights: AdapterWeights) -> AdapterWeights:
    """Every value of A moved to the float32 next to it."""

    def moved(a: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.nextafter(a.numpy(), np.float32(np.inf)))

    return {path: LoraPair(a=moved(pair.a), b=pair.b) for path, pair in weights.items()}


def distance(one: Curve, other: Curve) -> dict[str, float]:
    difference = np.array(one.losses) - np.array(other.losses)
    return {
        "max": float(np.abs(difference).max()),
        "rms": float(np.sqrt((difference**2).mean())),
        "drift": float(abs(difference.mean())),
        "held_out": abs(one.held_out[-1] - other.held_out[-1]),
    }


def judge(curve: Curve, solos: Sequence[Curve], noise: dict[str, float]) -> dict[str, object]:
    """Its usual distance to the runs alone, and whether that is more than theirs."""
    each = [distance(curve, solo) for solo in solos]
    usual = {metric: statistics.median(d[metric] for d in each) for metric in METRICS}
    beyond = [metric for metric in METRICS if usual[metric] > noise[metric]]
    return {**{metric: round(usual[metric], 7) for metric in METRICS}, "beyond": beyond}


def read_jobs(
    model: str, folder: Path, names: Sequence[str], steps: int, length: int, rate: float
) -> list[Job]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    jobs = []
    with tempfile.TemporaryDirectory() as cache:
        preparer = Preparer(tokenizer, cache_dir=Path(cache))
        for number, (name, rank, batch) in enumerate(JOBS):
            if name not in names:
                continue
            spec = JobSpec(
                name=name,
                data=DataSpec(path=str(folder / f"{name}.jsonl.gz")),
                lora=LoraSpec(r=rank, lora_alpha=2.0 * rank),
                train=TrainSpec(
                    max_steps=steps,
                    batch_size=batch,
                    learning_rate=rate,
                    max_length=length,
                    warmup_steps=min(10, steps // 4),
                    seed=number,
                ),
                eval=EvalSpec(split=32),
            )
            prepared = preparer.prepare(spec)
            assert prepared.evaluation is not None
            # In memory: the files are gone with the folder.
            jobs.append(Job(spec, in_memory(prepared.train), in_memory(prepared.evaluation)))
    return jobs


def in_memory(rows: TokenDataset) -> list[TokenSequence]:
    kept = [rows[i] for i in range(len(rows))]
    return [TokenSequence(np.array(r.input_ids), np.array(r.labels), r.origin) for r in kept]


def measure(bench: Bench, found: Figures) -> None:
    watched, *others = bench.jobs
    name = watched.spec.name
    wrong = replace(
        watched,
        spec=replace(
            watched.spec,
            lora=replace(watched.spec.lora, lora_alpha=watched.spec.lora.lora_alpha * WRONG_SCALE),
        ),
    )
    neighbour = next(
        (job.spec.name for job in others if job.spec.lora.r == watched.spec.lora.r), None
    )
    # What is wanted most first: a run that no longer fits is left out.
    runs: dict[str, Callable[[], Watcher]] = {
        "alone": lambda: bench.run([watched]),
        "fused": lambda: bench.run(bench.jobs),
        "alone, padded to the fused size": lambda: bench.run([watched], bucket_step=bench.budget),
        "alone, small nano-batches": lambda: bench.run(
            [watched], budget=bench.budget // 16, bucket_step=bench.budget // 16
        ),
        "twin: scale off by 2 %": lambda: bench.run([wrong]),
        "alone, other way round": lambda: bench.run([watched], engine=OtherWayRound),
        "alone, start moved by one bit": lambda: bench.run([watched], start=by_one_bit),
    }
    if neighbour is not None:
        runs["twin: a neighbour leaks 1 %"] = lambda: bench.run(
            bench.jobs, after_step=bench.leak(name, neighbour)
        )
    runs["alone, once more"] = lambda: bench.run([watched])
    curves: dict[str, Curve] = {}
    seconds: dict[str, float] = {}
    left_out: list[str] = []
    found.values["left_out"] = left_out
    for title, run in runs.items():
        like = "fused" if title.startswith("twin: a neighbour") else "alone"
        if found.left < 1.2 * seconds.get(like, 0.0):
            found.say(f"no time is left for: {title}")
            left_out.append(title)
            continue
        before = found.left
        watcher = run()
        seconds[title] = before - found.left
        curves[title] = watcher.curves[name]
        found.say(
            f"{title}: {seconds[title]:.1f} s, {watcher.nano_batches} nano-batches, held-out loss "
            f"{curves[title].held_out[0]:.5f} -> {curves[title].held_out[-1]:.5f}"
        )
        if title == "fused":
            learnt(watcher.curves, found)
        found.values["run_seconds"] = {key: round(value, 1) for key, value in seconds.items()}
        if "fused" in curves and len(curves) > 2:
            compare(curves, found)
    verdicts(found)


def learnt(curves: dict[str, Curve], found: Figures) -> None:
    rows = [
        [job, curve.held_out[0], curve.held_out[-1], curve.held_out[-1] < curve.held_out[0]]
        for job, curve in curves.items()
    ]
    found.table(["job", "held out before", "after", "lower"], rows)
    found.values["held_out"] = {str(row[0]): [row[1], row[2]] for row in rows}
    found.values["all_lower"] = all(row[3] for row in rows)


def compare(curves: dict[str, Curve], found: Figures) -> None:
    solos = {title: curve for title, curve in curves.items() if title.startswith("alone")}
    if len(solos) < 2:
        return
    pairs = {
        f"{one} | {other}": distance(solos[one], solos[other])
        for one, other in combinations(solos, 2)
    }
    noise = {metric: max(pair[metric] for pair in pairs.values()) for metric in METRICS}
    usual = {
        metric: statistics.median(pair[metric] for pair in pairs.values()) for metric in METRICS
    }
    judged = {
        title: judge(curve, list(solos.values()), noise)
        for title, curve in curves.items()
        if title not in solos
    }
    found.values |= {"noise_largest": noise, "noise_median": usual, "pairs": pairs}
    found.values["judged"] = judged
    found.values["curves"] = {
        title: [round(loss, 6) for loss in curve.losses] for title, curve in curves.items()
    }


def verdicts(found: Figures) -> None:
    noise, judged = found.values.get("noise_largest"), found.values.get("judged")
    if not isinstance(noise, dict) or not isinstance(judged, dict):
        found.say("too few runs to say anything")
        return
    median = found.values["noise_median"]
    assert isinstance(median, dict)
    rows: list[list[object]] = [
        ["alone to alone, median", *(median[metric] for metric in METRICS), ""],
        ["alone to alone, largest", *(noise[metric] for metric in METRICS), ""],
    ]
    for title, each in judged.items():
        beyond = ", ".join(each["beyond"]) or "within noise"
        rows.append([f"{title} to alone", *(each[metric] for metric in METRICS), beyond])
    found.table(["distance", *METRICS, "beyond noise in"], rows)
    found.note("within_noise", not judged["fused"]["beyond"] if "fused" in judged else None)
    found.note(
        "twins_found", {t: bool(j["beyond"]) for t, j in judged.items() if t.startswith("twin")}
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, seconds=200)
    parser.add_argument("--model", required=True, help="a Hugging Face checkpoint's directory")
    parser.add_argument("--data", type=Path, required=True, help="folder of NAME.jsonl.gz")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a nano-batch")
    parser.add_argument("--length", type=int, default=512, help="longest sequence")
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--jobs", default=",".join(name for name, *_ in JOBS))
    given = parser.parse_args(arguments)
    with figures("bf16_noise", given) as found:
        jobs = read_jobs(
            given.model, given.data, given.jobs.split(","), given.steps, given.length, given.rate
        )
        device = torch.device(given.device)
        base = load_base(BaseSpec(model=given.model, dtype=given.dtype), device)
        rows = sum(job.spec.lora.r for job in jobs)
        found.values["settings"] = {
            "model": Path(given.model).name,
            "parameters": base.num_parameters(),
            **{key: getattr(given, key) for key in ("steps", "budget", "length", "rate", "dtype")},
            "jobs": {
                job.spec.name: {
                    "rank": job.spec.lora.r,
                    "batch": job.spec.train.batch_size,
                    "rows": len(job.train),
                    "held_out_rows": len(job.evaluation),
                }
                for job in jobs
            },
        }
        found.say(f"{len(jobs)} jobs are read; the model has {base.num_parameters():,} parameters")
        model = SuperModel(base, reserve_rows=rows, compiled=compiles(given))
        measure(Bench(model, jobs, given.budget), found)


if __name__ == "__main__":
    main(sys.argv[1:])
