"""Does the controller find the best size of nano-batches on this device by itself?

    python benchmarks/tuned_size.py [--shape llama-1b] [--json benchmarks/results/FILE.jsonl]

Trains the same random jobs with nano-batches of every power of two, then with a size that is tuned,
and prints tokens/s by size, the decisions, where it ended, and what the search cost: useful tokens
over the time of all nano-batches, compiling included and without it, against the best fixed size
(whose first nano-batches are left out).
"""

import argparse
import json
import shlex
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from tlora.core.errors import JobFailed
from tlora.core.job import JobSpec
from tlora.model.loading import resolve_device
from tlora.model.super_model import SuperModel
from tlora.runtime.benchmark import shapes
from tlora.runtime.benchmark.machine import device_name
from tlora.runtime.benchmark.record import commit, versions
from tlora.runtime.benchmark.workload import Workload, new_workload
from tlora.runtime.budget import WARM_UPS, tokens_that_fit
from tlora.training.controller import Controller
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine
from tlora.training.loop import run_jobs
from tlora.training.outcome import EvaluationDone, Outcome, StepDone
from tlora.training.size_search import ControllerSettings, ladder


class Watch:
    """An observer that keeps the nano-batches, up to so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens
        self.outcomes: list[Outcome] = []

    def over(self) -> bool:
        return self.left <= 0

    def on_nano_batch(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.left -= sum(outcome.tokens.values())

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        pass

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        pass

    def on_end(self, driver: JobDriver) -> None:
        raise JobFailed(driver.reason or "there was too little work", job=driver.name)


def train(engine: Engine, work: Workload, jobs: list[JobSpec], tokens: int) -> list[Outcome]:
    watch = Watch(tokens)
    drivers = [JobDriver(job, work.rows[job.name]) for job in jobs]
    for driver in drivers:
        driver.attach(engine, engine.super_model.new_adapter(driver.spec))
    for driver in run_jobs(engine, drivers, watch, should_stop=watch.over):
        engine.detach(driver.name)
    return watch.outcomes


def tokens_per_s(outcomes: list[Outcome]) -> float:
    tokens = sum(sum(outcome.tokens.values()) for outcome in outcomes)
    return tokens / sum(outcome.seconds for outcome in outcomes)


def median_rate(outcomes: list[Outcome]) -> float:
    return statistics.median(sum(o.tokens.values()) / o.seconds for o in outcomes if o.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", default="llama-1b", help="llama-1b, llama-8b, demo or a model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--low", type=int, default=512)
    parser.add_argument("--high", type=int, default=16384)
    parser.add_argument("--nano-batches", type=int, default=300, help="of the usual size, tuned")
    parser.add_argument("--usual", type=int, default=8192)
    parser.add_argument("--fixed", type=int, default=8, help="nano-batches of each fixed size")
    parser.add_argument("--json", type=Path, help="append one line to this file")
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    shape = shapes.look_at(arguments.shape, arguments.dtype, device)
    ranks = (8, 16, 32, 64)
    reserve = sum(ranks[at % 4] for at in range(arguments.jobs)) + max(ranks)
    base = shapes.load(shape, device)
    model = SuperModel(base, reserve_rows=reserve, compiled=device.type == "cuda")
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else sys.maxsize
    limit = min(arguments.high, tokens_that_fit(model, free, recompute=False))
    batch = -(-arguments.high // (arguments.length * arguments.jobs)) * 2
    passed = arguments.nano_batches * arguments.usual
    work = new_workload(
        num_jobs=arguments.jobs,
        ranks=ranks,
        batches=(batch,),
        lengths=(arguments.length,),
        steps=2 + passed // (batch * arguments.length * arguments.jobs),
        dropout=0.0,
        vocabulary=shape.vocabulary,
    )
    print(f"{shape.name} on {device_name(device)}, {arguments.jobs} jobs, at most {limit} tokens")

    warm_ups = max(1, WARM_UPS[device.type])
    fixed: dict[int, float] = {}
    size = arguments.low
    while size <= limit:
        engine = Engine(model, budget_tokens=size)
        outcomes = train(engine, work, work.jobs, (warm_ups + arguments.fixed) * size)
        fixed[size] = median_rate(outcomes[warm_ups:])
        print(f"  nano-batches of {size:6}: {fixed[size]:10,.0f} tokens/s", flush=True)
        size *= 2
    best = max(fixed, key=lambda each: fixed[each])

    sizes = ladder(arguments.low, limit)
    start = max(size for size in sizes if size <= max(arguments.low, arguments.usual // 4))
    settings = ControllerSettings(
        sizes=sizes, start=start, idle=start, limit=limit, warm_ups=WARM_UPS[device.type]
    )
    controller = Controller(settings)
    engine = Engine(model, budget_tokens=start, controller=controller)
    outcomes = train(engine, work, work.jobs, passed)
    decisions = [decision for outcome in outcomes for decision in outcome.decisions]
    for each in decisions:
        rate = f"{each.tokens_per_s:,.0f}" if each.tokens_per_s else "-"
        what = f"{each.action.value:10} to {each.budget:6}"
        print(f"  {each.nano_batch:5} {what}  {rate:>9}  {each.why}")
    settled = [o for o in outcomes if o.measure and o.measure.budget == controller.best]
    found, ran = median_rate(settled), [outcome for outcome in outcomes if outcome.seconds]
    usual = statistics.median(outcome.seconds for outcome in ran)
    steady = [outcome for outcome in ran if outcome.seconds < 5 * usual]
    together, without = tokens_per_s(ran), tokens_per_s(steady)
    print(f"best fixed size {best}: {fixed[best]:,.0f}; tuned to {controller.best}: {found:,.0f}")
    print(
        f"the whole tuned run: {together:,.0f} tokens/s ({together / fixed[best]:.1%} of the best)"
    )
    print(f"without {len(ran) - len(steady)} slow nano-batches: {without / fixed[best]:.1%}")
    if arguments.json is not None:
        line = {
            "v": 1,
            "kind": "tuned_size",
            "commit": commit(),
            "command": f"python {shlex.join(sys.argv)}",
            "device": device_name(device),
            "versions": versions(),
            "shape": shape.name,
            "fixed_tokens_per_s": {str(size): round(rate, 1) for size, rate in fixed.items()},
            "tuned_to": controller.best,
            "tuned_tokens_per_s": round(found, 1),
            "whole_run_tokens_per_s": round(together, 1),
            "whole_run_without_slow": round(without, 1),
            "decisions": [asdict(d) | {"action": d.action.value} for d in decisions],
        }
        with arguments.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
