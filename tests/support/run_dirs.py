"""Run directories made up without training, to look at what is said of them."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tlora.config import dump_spec
from tlora.core.job import BaseSpec, DataSpec, EvalSpec, JobSpec, LoraSpec, RunSpec, TrainSpec
from tlora.runtime.benchmark.landscapes import Landscape, settings_for
from tlora.training.controller import Controller
from tlora.training.size_search import Measure

BEGAN = 1_700_000_000.0
ROWS = 1024


def job_of(at: int, steps: int) -> JobSpec:
    """Jobs that differ; every third is not evaluated."""
    return JobSpec(
        name=f"job-{at:03}",
        data=DataSpec(path=f"data/{at}.jsonl"),
        lora=LoraSpec(r=(4, 8, 16, 64)[at % 4]),
        train=TrainSpec(learning_rate=(1e-4, 2e-4, 1e-3)[at % 3], max_steps=steps),
        eval=EvalSpec(split=0 if at % 3 == 2 else 32, steps=20),
    )


def synthetic_run(
    root: Path,
    *,
    jobs: int = 3,
    nano_batches: int = 200,
    sharing: int = 4,
    failing: Sequence[str] = (),
    reason: str = "the loss is not finite at step 12",
    unfinished: Sequence[str] = (),
    resumed_at: int | None = None,
    tuned: Landscape | None = None,
    seed: int = 0,
) -> Path:
    """A run whose jobs take a step with every pass they are in, and share it in small groups. Jobs
    named in `failing` end after a third of their steps; those in `unfinished` stop halfway without
    a result. With `tuned` the size of nano-batches is, on that landscape."""
    draw = random.Random(seed)
    steps = max(2, nano_batches * min(sharing, jobs) // (2 * jobs))
    specs = [job_of(at, steps) for at in range(jobs)]
    root.mkdir(parents=True)
    (root / "resolved.yaml").write_text(
        dump_spec(RunSpec(base=BaseSpec(model="models/base"), jobs=tuple(specs)))
    )
    about = {
        "v": 1,
        "base": "models/base",
        "jobs": [job.name for job in specs],
        "device": "cpu",
        "isolation": "default",
        "versions": {"tlora": "0.1.0", "torch": "2.13.0"},
        "started": BEGAN,
    }
    (root / "run.json").write_text(json.dumps(about))
    now = BEGAN
    events = [event("attached", now, job=job.name) for job in specs]
    metrics: dict[str, list[dict]] = {job.name: [] for job in specs}
    taken = {job.name: 0 for job in specs}
    seen = {job.name: 0 for job in specs}
    active = [job.name for job in specs]
    tuner = Controller(settings_for(tuned)) if tuned else None
    if tuner is not None:
        events.append(event("tuning", now, settings=asdict(tuner.settings)))
    evaluated = {job.name for job in specs if job.eval.split}
    for at in range(nano_batches):
        if not active:
            break
        if at == resumed_at:
            now += 86_400
            events += [event("attached", now, job=job) for job in active]
        evaluation = at % 20 == 0
        able = [job for job in active if not evaluation or job in evaluated] or active
        shared = draw.sample(able, min(sharing, len(able)))
        tokens = {job: draw.randrange(120, ROWS // max(1, len(shared))) for job in shared}
        seconds = 0.1 + 0.02 * draw.random()
        rows, purpose = ROWS, "eval" if evaluation else "train"
        measure, decisions = {}, ()
        if tuned is not None and tuner is not None:
            rows = tuner.budget
            tokens = {job: rows // len(shared) for job in shared}
            rate = tuned.rate(rows, at / nano_batches) * math.exp(draw.gauss(0, tuned.noise))
            seconds = round(rows / rate, 6)
            told = Measure(rows, rows, sum(tokens.values()), seconds, train=not evaluation)
            measure, decisions = {"measure": asdict(told)}, tuner.observe(told)
        now += seconds
        events.append(
            event(
                "nano_batch", now, purpose=purpose, rows=rows, tokens=tokens, error=None, **measure
            )
        )
        for each in decisions:
            events.append(event("tuned", now, **asdict(each) | {"action": each.action.value}))
        for job in shared:
            taken[job] += not evaluation
            seen[job] += 0 if evaluation else tokens[job]
            loss = 1 + 5 * math.exp(-4 * taken[job] / steps) + 0.3 * draw.random()
            metrics[job].append(
                {
                    "v": 1,
                    "kind": purpose,
                    "job": job,
                    "step": taken[job],
                    "total_steps": steps,
                    "loss": loss,
                    "tokens_seen": seen[job],
                    "time": now,
                }
            )
            fails = job in failing and taken[job] >= steps / 3
            if job in unfinished and taken[job] >= steps / 2:
                active.remove(job)
            elif fails or taken[job] >= steps:
                active.remove(job)
                status = "failed" if fails else "completed"
                why = reason if fails else None
                events.append(event("ended", now, job=job, status=status, reason=why))
                write_result(root, job, status, why, metrics[job])
    (root / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    for job, records in metrics.items():
        (root / job).mkdir(exist_ok=True)
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (root / job / "metrics.jsonl").write_text(lines)
    return root


def event(kind: str, time: float, **fields: object) -> dict[str, object]:
    return {"v": 1, "kind": kind, **fields, "time": time}


def write_result(
    root: Path, job: str, status: str, reason: str | None, records: list[dict]
) -> None:
    evaluations = [record for record in records if record["kind"] == "eval"]
    best = min(evaluations, key=lambda record: record["loss"], default=None)
    done = status == "completed"
    last = records[-1]
    (root / job).mkdir(exist_ok=True)
    result = {
        "v": 1,
        "job": job,
        "status": status,
        "reason": reason,
        "steps": last["step"],
        "total_steps": last["total_steps"],
        "loss": last["loss"],
        "first_eval_loss": evaluations[0]["loss"] if evaluations else None,
        "eval_loss": evaluations[-1]["loss"] if evaluations else None,
        "best_eval_loss": best["loss"] if best else None,
        "best_step": best["step"] if best else None,
        "tokens_seen": last["tokens_seen"],
        "sequences_seen": 0,
        "seconds": last["time"] - BEGAN,
        "adapter": f"{job}/adapter" if done else None,
        "best_adapter": None,
        "serving": [f"vllm serve models/base --lora-modules {job}={job}/adapter"] if done else [],
    }
    (root / job / "result.json").write_text(json.dumps(result))
