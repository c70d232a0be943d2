"""A steady fused step on a GPU within two minutes: its rate, what that is of the frozen backbone's,
and where its time goes.

    python benchmarks/gpu_step.py --shape llama-8b --budgets 8192,2048 --json FILE

Eight jobs of rank 8, 16, 32 and 64 in turn, all with work waiting: nano-batches are full, and have
tokens of all of them where the budget holds a sequence each. For each budget:

1. Fused steps, then our backbone with no adapters and the plain backbone with compiled layers in
   turn, then the jobs come back and take as many steps again; medians of blocks of steps, as the
   host waits for a step only when the next one is under way. The fraction is against the faster
   frozen one. Jobs that come back must not have anything captured or compiled.
2. Some fused steps and frozen batches under torch's profiler: the kernels' time against the time of
   a step (what is missing is an idle device), the kernels that take longest, LoRA's share, and
   behind which kernels the device had nothing to do.
3. Peak memory of fused steps, from the first on, over the plain frozen backbone's, which is taken
   as in gpu_memory.py. A step that replays a captured graph allocates nothing that torch counts.

A line is written as soon as a budget is through. `tlora bench` compares whole runs, and more arms.
"""

import argparse
import logging
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from figures import Figures, compiles, figures, options
from gpu_memory import frozen_peak
from random_models import SHAPES, random_model
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tlora.model.compiling import graphs_compiled
from tlora.model.super_model import SuperModel
from tlora.runtime.benchmark import shapes
from tlora.runtime.benchmark.arms import Adapters, draw_adapters
from tlora.runtime.benchmark.frozen import OwnFrozen, PlainFrozen, why_not_compiled
from tlora.runtime.benchmark.machine import now, peak_memory
from tlora.runtime.benchmark.settings import read_lengths
from tlora.runtime.benchmark.steadiness import BEFORE_CAPTURE, settle
from tlora.runtime.benchmark.workload import Workload, new_workload
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine

JOBS = 8
RANKS = (8, 16, 32, 64)
FROZEN_BATCHES = 6
BLOCK = 6
"""Steps of one measure."""

PROFILED_STEPS = 3
"""With one alone, the host would have had nothing on its way before it."""

MOST_WARM_UP_STEPS = 24
FIRST_STEPS = BEFORE_CAPTURE + 1
TOP = 12
LORA = re.compile(r"(shrink|expand|reduce|sum|lay|sum_into_slots)_kernel(_\d+)?")
"""The whole name of a kernel of tlora/kernels/multi_lora; torch has longer ones like it."""

PRODUCT = re.compile(r"product_kernel(_\d+)?")
"""A frozen product with the update inside. Without adapters it would be cuBLAS's, so its time is
told by itself and is no part of `lora_share`."""


class Steps:
    """Jobs that stay attached; each call is one nano-batch."""

    def __init__(self, model: SuperModel, work: Workload, budget: int, adapters: Adapters) -> None:
        self.engine = Engine(model, budget_tokens=budget)
        self.drivers = {job.name: JobDriver(job, work.rows[job.name]) for job in work.jobs}
        for name, driver in self.drivers.items():
            driver.attach(self.engine, adapters[name])
        self.tokens = 0

    def __call__(self) -> None:
        for driver in self.drivers.values():
            driver.advance(self.engine)
        outcome = self.engine.run_nano_batch()
        assert not outcome.failures and not outcome.error, outcome
        for step in outcome.steps:
            self.drivers[step.job].on_step(step)
        self.tokens += sum(outcome.tokens.values())

    def leave(self) -> None:
        for name in self.drivers:
            self.engine.detach(name)


def workload(given: argparse.Namespace, vocabulary: int, budget: int) -> Workload:
    """Each job has an eighth of a nano-batch, or one sequence if that is more."""
    lengths = [min(length, budget) for length in read_lengths(given.lengths)]
    batch = max(1, round(budget / JOBS / statistics.mean(lengths)))
    # None may run out of steps: where a batch is larger than a share, a step takes more of them.
    steps = 2 * (MOST_WARM_UP_STEPS + 2 * given.rounds * BLOCK + 4)
    return new_workload(
        num_jobs=JOBS,
        ranks=RANKS,
        batches=(batch,),
        lengths=lengths,
        steps=steps,
        dropout=given.dropout,
        vocabulary=vocabulary,
    )


def frozen_workload(work: Workload, budget: int) -> Workload:
    """A few batches of the same sequences."""
    rows = {name: [] for name in work.rows}
    room = FROZEN_BATCHES * budget
    for each in zip(*work.rows.values(), strict=True):
        for name, row in zip(rows, each, strict=True):
            if len(row) > room:
                return Workload(work.jobs, rows)
            rows[name].append(row)
            room -= len(row)
    return Workload(work.jobs, rows)


def adapters_by_rank(model: SuperModel, work: Workload) -> Adapters:
    """Jobs of a rank start from the same one: drawing takes seconds in a large model."""
    drawn = draw_adapters(model, work.jobs[: len(RANKS)])
    by_rank = {job.lora.r: drawn[job.name] for job in work.jobs[: len(RANKS)]}
    return {job.name: by_rank[job.lora.r] for job in work.jobs}


class Busy(NamedTuple):
    """When the device worked on something, in microseconds."""

    began: float
    ended: float
    what: str


def gaps_of(busy: Iterable[Busy]) -> dict[str, tuple[float, int]]:
    """Microseconds without work, and how often, by what ran before. Work may overlap."""
    gaps: dict[str, tuple[float, int]] = {}
    last: Busy | None = None
    for each in sorted(busy):
        if last is not None and each.began > last.ended:
            idle, times = gaps.get(last.what, (0.0, 0))
            gaps[last.what] = (idle + each.began - last.ended, times + 1)
        if last is None or each.ended > last.ended:
            last = each
    return gaps


def kernels_of(step: Callable[[], object], device: torch.device, *, batches: int = 1) -> dict:
    """Milliseconds of a batch by kernel; on a CPU by operator, which shows that the script runs."""
    on_cuda = device.type == "cuda"
    kind = DeviceType.CUDA if on_cuda else DeviceType.CPU
    activity = ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        step()
        now(device)
    times: dict[str, tuple[float, int]] = {}
    for event in profiled.key_averages():
        spent = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        if event.device_type == kind and spent > 0:
            before = times.get(event.key, (0.0, 0))
            times[event.key] = (before[0] + spent / 1e3, before[1] + event.count)
    ordered = sorted(times.items(), key=lambda each: -each[1][0])
    total = sum(milliseconds for _, (milliseconds, _) in ordered)
    events = profiled.events() or [] if on_cuda else []
    gaps = gaps_of(
        Busy(each.time_range.start, each.time_range.end, each.name)
        for each in events
        if each.device_type == kind and not each.is_user_annotation
    )
    longest = sorted(gaps.items(), key=lambda each: -each[1][0])[:TOP]
    lora, products = (
        sum(ms for name, (ms, _) in ordered if of.fullmatch(name)) for of in (LORA, PRODUCT)
    )
    return {
        "ms": round(total / batches, 3),
        "launches": round(sum(count for _, (_, count) in ordered) / batches),
        "lora_ms": round(lora / batches, 3),
        "products_inside_ms": round(products / batches, 3),
        "top": [
            [name[:100], round(milliseconds / batches, 3), round(count / batches, 1)]
            for name, (milliseconds, count) in ordered[:TOP]
        ],
        "gaps_ms": round(sum(idle for idle, _ in gaps.values()) / 1e3 / batches, 3),
        "gaps": [
            [name[:100], round(idle / 1e3 / batches, 3), round(times / batches, 1)]
            for name, (idle, times) in longest
        ],
    }


class Bench:
    """One model for all budgets; `found` is of the budget under way."""

    def __init__(self, given: argparse.Namespace, found: Figures) -> None:
        self.given, self.found = given, found
        self.device = torch.device(given.device)
        self.base = random_model(given.shape, self.device, layers=given.layers)
        budgets = [int(each) for each in given.budgets.split(",")]
        self.frozen_peaks = {rows: frozen_peak(self.base, rows) or 0 for rows in budgets}
        self.model = SuperModel(
            shapes.twin(self.base),
            reserve_rows=JOBS // len(RANKS) * sum(RANKS),
            compiled=compiles(given),
        )
        work = workload(given, self.model.vocabulary, budgets[0])
        self.adapters = adapters_by_rank(self.model, work)
        found.say("model and adapters are there")

    def state(self) -> tuple[int, int]:
        return self.model.captures, graphs_compiled()

    def attached(self, work: Workload, budget: int) -> Steps:
        return Steps(self.model, work, budget, self.adapters)

    def warm_up(self, steps: Steps) -> int:
        """Until nothing is captured or compiled any more. The peak in bytes: a step that replays a
        graph shows none."""
        taken = 0

        def several() -> None:
            nonlocal taken
            for _ in range(FIRST_STEPS):
                steps()
            taken += FIRST_STEPS

        with peak_memory(self.device) as peak:
            settle(several, self.state, most=MOST_WARM_UP_STEPS // FIRST_STEPS)
        captures, graphs = self.state()
        self.found.note("warm_up", {"steps": taken, "captures": captures, "graphs": graphs})
        return peak.bytes or 0

    def frozen_arms(self, work: Workload, budget: int) -> dict[str, OwnFrozen | PlainFrozen]:
        """Warm. The plain one is padded: rows apart need no mask, and sorted ones few zeros."""
        own = OwnFrozen(self.model, work, budget)
        settle(own, self.state)
        arms: dict[str, OwnFrozen | PlainFrozen] = {"own": own}
        if compiles(self.given):
            twin = shapes.twin(self.base)
            plain = PlainFrozen(twin, work, budget, packed=False)
            left = int(max(1, self.found.left))
            reason = why_not_compiled(twin, plain, left, dynamic=plain.shapes_vary)
            self.found.values["not_compiled"] = reason
            if reason is None:
                arms["compiled"] = plain
        self.found.say(f"frozen backbones are warm: {', '.join(arms)}")
        return arms

    def measure(self, budget: int) -> None:
        values, rounds, device = self.found.values, self.given.rounds, self.device
        values["budget"] = budget
        work = workload(self.given, self.model.vocabulary, budget)
        steps = self.attached(work, budget)
        peak = self.warm_up(steps)
        first = [timed(steps, device) for _ in range(rounds)]
        kernels = kernels_of(
            lambda: [steps() for _ in range(PROFILED_STEPS)], device, batches=PROFILED_STEPS
        )
        steps.leave()

        few = frozen_workload(work, budget)
        arms = self.frozen_arms(few, budget)
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(rounds):
            for name, arm in arms.items():
                seconds[name].append(arm().seconds)
        batches = len(arms["own"].batches)
        frozen_kernels = kernels_of(arms["own"], device, batches=batches)

        before = self.state()
        steps = self.attached(work, budget)
        steps()
        again = [timed(steps, device) for _ in range(rounds)]
        steps.leave()

        step_ms = statistics.median(ms for ms, _ in first + again)
        rate = statistics.median(tokens / ms * 1e3 for ms, tokens in first + again)
        rates = {name: few.tokens / statistics.median(each) for name, each in seconds.items()}
        drift = statistics.median(ms for ms, _ in again) / statistics.median(ms for ms, _ in first)
        values.update(
            tokens=round(first[-1][1]),
            tokens_per_s=round(rate, 1),
            step_ms=round(step_ms, 3),
            steps_ms=[round(ms, 2) for ms, _ in first + again],
            drift_pct=round(100 * (drift - 1), 2),
            frozen={name: round(each, 1) for name, each in rates.items()},
            frozen_fraction=round(rate / max(rates.values()), 4),
            captures=self.model.captures,
            graphs=graphs_compiled(),
            came_back_unchanged=JOBS if self.state() == before else 0,
            kernels=kernels,
            idle_share=round(1 - kernels["ms"] / step_ms, 4),
            lora_share=round(kernels["lora_ms"] / max(kernels["ms"], 1e-9), 4),
            frozen_kernels=frozen_kernels,
            frozen_batch_ms=round(1e3 * statistics.median(seconds["own"]) / batches, 3),
            peak_gb=round(peak / 1e9, 3),
            frozen_peak_gb=round(self.frozen_peaks[budget] / 1e9, 3),
            over_frozen_gb=round((peak - self.frozen_peaks[budget]) / 1e9, 3),
        )
        report(values, self.found)


def timed(steps: Steps, device: torch.device) -> tuple[float, float]:
    """Milliseconds and tokens of one nano-batch among several."""
    # Its tokens are told when the next one is under way.
    steps()
    started, before = now(device), steps.tokens
    for _ in range(BLOCK):
        steps()
    milliseconds = (now(device) - started) * 1e3
    return milliseconds / BLOCK, (steps.tokens - before) / BLOCK


def report(values: dict, found: Figures) -> None:
    names = ("tokens_per_s", "step_ms", "frozen_fraction", "idle_share", "lora_share")
    found.table(
        ["budget", *names, "own", "compiled", "over frozen GB"],
        [
            [
                values["budget"],
                *(values[name] for name in names),
                values["frozen"]["own"],
                values["frozen"].get("compiled", "-"),
                values["over_frozen_gb"],
            ]
        ],
    )
    for name in ("kernels", "frozen_kernels"):
        kernels = values[name]
        found.say(f"{name}: {kernels['ms']} ms in {kernels['launches']} launches")
        rows = [[spent, count, kernel] for kernel, spent, count in kernels["top"]]
        found.table(["ms", "launches", "kernel"], rows)
        rows = [[idle, times, kernel] for kernel, idle, times in kernels["gaps"]]
        found.say(f"without work for {kernels['gaps_ms']} ms, behind these:")
        found.table(["ms", "times", "kernel"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, seconds=240)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--budgets", default="8192,2048", help="tokens of nano-batches")
    parser.add_argument("--lengths", default="512", help="a length, or a file with one per line")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3, help="blocks before and after the frozen")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    bench: Bench | None = None
    until = time.monotonic() + given.seconds
    for budget in map(int, given.budgets.split(",")):
        given.seconds = round(max(1, until - time.monotonic()))
        with figures("gpu_step", given) as found:
            found.values["settings"] = {
                key: getattr(given, key)
                for key in ("shape", "layers", "lengths", "dropout", "rounds", "budgets")
            }
            bench = bench or Bench(given, found)
            bench.found = found
            bench.measure(budget)
        if not found.values["complete"]:
            break


if __name__ == "__main__":
    main(sys.argv[1:])
