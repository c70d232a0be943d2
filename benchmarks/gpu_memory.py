"""Memory of a fused run on a GPU: its peak, checkpointing, running out of it, idle adapters.

    python benchmarks/gpu_memory.py --shape llama-8b --json FILE

1. Peak: eight jobs of rank 8 to 64 in nano-batches of 8,192 rows, over the frozen weights and over
   the plain frozen backbone on as many tokens (forward and backward, no head).
2. The same with gradient checkpointing, with S kept and with S made again, with their times.
3. Out of memory: the device is made small, so that the first nano-batches do not fit. The engine
   must go on under a smaller budget and lose no job.
4. Residents: 64 adapters of rank 16, of which 8 or 16 have work; useful tokens per second of each.
"""

import gc
import logging
import statistics
import sys
from collections.abc import Sequence

import numpy as np
import torch
from figures import Figures, compiles, figures, options
from random_models import LENGTHS, SHAPES, random_model
from transformers.modeling_utils import PreTrainedModel

from tlora.model.adapters import AdapterWeights
from tlora.model.super_model import SuperModel
from tlora.runtime.benchmark.arms import Counter, TimedEngine
from tlora.runtime.benchmark.frozen import InputGradient
from tlora.runtime.benchmark.machine import now, peak_memory
from tlora.runtime.benchmark.workload import Workload, new_workload
from tlora.training.driver import JobDriver
from tlora.training.exactness import random_adapter
from tlora.training.loop import run_jobs
from tlora.training.outcome import Outcome

RANKS = (8, 16, 32, 64)


def allocated(device: torch.device) -> int:
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def gigabytes(value: float | None) -> float:
    return round((value or 0) / 1e9, 2)


class Errors(Counter):
    """Counts work, and keeps what broke nano-batches off."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def on_nano_batch(self, outcome: Outcome) -> None:
        super().on_nano_batch(outcome)
        if outcome.error is not None:
            self.errors.append(outcome.error[:120])


class Round:
    """Jobs attached, with their drivers."""

    def __init__(
        self,
        model: SuperModel,
        work: Workload,
        rows: int,
        adapters: dict[int, AdapterWeights],
        engine: TimedEngine | None = None,
    ) -> None:
        self.engine = engine or TimedEngine(model, budget_tokens=rows)
        self.drivers = [JobDriver(spec, work.rows[spec.name]) for spec in work.jobs]
        for driver in self.drivers:
            driver.attach(self.engine, adapters[driver.spec.lora.r])
        self.counter = Errors()
        self.seconds = 0.0

    def run(self) -> "Round":
        device = self.engine.super_model.device
        self.engine.detach_seconds = 0.0
        started = now(device)
        run_jobs(self.engine, self.drivers, self.counter)
        self.seconds = now(device) - started - self.engine.detach_seconds
        return self


def workload(model: SuperModel, *, jobs: int, ranks: Sequence[int], **settings) -> Workload:
    return new_workload(
        num_jobs=jobs, ranks=ranks, dropout=0.0, vocabulary=model.vocabulary, **settings
    )


def adapters_of(model: SuperModel, ranks: Sequence[int]) -> dict[int, AdapterWeights]:
    """One for each rank, which all jobs of that rank start from; B is not zero."""
    generator = np.random.default_rng(0)
    return {rank: random_adapter(model, rank, generator) for rank in sorted(set(ranks))}


def frozen_peak(model: PreTrainedModel, rows: int) -> int | None:
    """Of the plain backbone, forward and backward, on sequences of 512 tokens."""
    model.requires_grad_(False)
    length = min(512, rows)
    ids = torch.randint(0, model.config.vocab_size, (rows // length, length), device=model.device)
    gradient = InputGradient(model)
    with peak_memory(model.device) as peak:
        hidden = model.base_model(input_ids=ids, use_cache=False)[0]
        hidden.backward(torch.randn_like(hidden))
    gradient.remove()
    return peak.bytes


def measure_peak(
    model: SuperModel, rows: int, steps: int, adapters: dict[int, AdapterWeights]
) -> dict[str, float]:
    lengths = [length for length in LENGTHS if length <= rows]
    work = workload(model, jobs=8, ranks=RANKS, batches=(8,), lengths=lengths, steps=steps)
    Round(model, work, rows, adapters).run()  # Compiles, and lets the pool grow.
    with peak_memory(model.device) as peak:
        one = Round(model, work, rows, adapters)
        attached = allocated(model.device)
        one.run()
    assert not one.counter.errors, one.counter.errors
    return {
        "attached_gb": gigabytes(attached),
        "peak_gb": gigabytes(peak.bytes),
        "ms_per_nano_batch": round(1e3 * one.seconds / one.counter.nano_batches, 2),
        "tokens_per_s": round(work.tokens / one.seconds, 1),
    }


def report_peaks(peaks: dict[str, dict[str, float]], frozen: dict[str, float], found: Figures):
    for figures_of in peaks.values():
        figures_of["over_weights_gb"] = round(figures_of["peak_gb"] - frozen["weights_gb"], 2)
        figures_of["over_frozen_gb"] = round(figures_of["peak_gb"] - frozen["peak_gb"], 2)
    columns = list(next(iter(peaks.values())))
    found.table(
        ["nano-batch", *columns], [[title, *each.values()] for title, each in peaks.items()]
    )
    found.values["peaks"] = peaks


def measure_out_of_memory(
    model: SuperModel, rows: int, adapters: dict[int, AdapterWeights], peak_gb: float
) -> dict[str, object]:
    """Room for what is attached and half of what a whole nano-batch takes on top."""
    lengths = [length for length in LENGTHS if length <= rows // 4]
    work = workload(model, jobs=8, ranks=RANKS, batches=(8,), lengths=lengths, steps=2)
    one = Round(model, work, rows, adapters)
    device = model.device
    total = torch.cuda.get_device_properties(device).total_memory
    attached = allocated(device)
    allowed = attached + 0.55 * (peak_gb * 1e9 - attached)
    torch.cuda.set_per_process_memory_fraction(allowed / total, device)
    try:
        one.run()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    done = sum(driver.step == 2 for driver in one.drivers)
    return {
        "allowed_gb": gigabytes(allowed),
        "needed_gb": peak_gb,
        "broken_off": len(one.counter.errors),
        "first_error": one.counter.errors[0] if one.counter.errors else None,
        "budget_tokens": [rows, one.engine.budget_tokens],
        "jobs_done": done,
        "held": done == len(one.drivers)
        and bool(one.counter.errors)
        and one.engine.budget_tokens < rows,
    }


def measure_residents(
    model: SuperModel, rows: int, rounds: int, residents: int, found: Figures
) -> None:
    """8 and 16 busy jobs on the same tokens, the others attached and idle."""
    adapters = adapters_of(model, [16])
    length = min(512, rows // 16)
    taken: dict[int, list[float]] = {8: [], 16: []}
    tokens = 0
    engine = TimedEngine(model, budget_tokens=rows)

    def attach_idle(name: str, count: int) -> list[str]:
        names = [f"{name}-{number}" for number in range(count)]
        for each in names:
            engine.attach(each, adapters[16], scale=2.0)
        return names

    attach_idle("idle", residents - 16)
    found.say(f"{residents - 16} idle jobs are attached")
    for number in range(rounds + 1):
        for busy in taken:
            work = workload(
                model,
                jobs=busy,
                ranks=(16,),
                batches=(rows // 2 // length,),
                lengths=(length,),
                steps=32 // busy,
            )
            tokens = work.tokens
            spare = attach_idle("spare", 16 - busy)
            one = Round(model, work, rows, adapters, engine).run()
            for name in spare:
                engine.detach(name)
            if number:
                taken[busy].append(one.seconds)
        if number:
            rates = {busy: tokens / statistics.median(seconds) for busy, seconds in taken.items()}
            ratios = [b / a for a, b in zip(taken[8], taken[16], strict=True)]
            slowdown = statistics.median(ratios) - 1
            found.note(
                "residents",
                {
                    "attached": residents,
                    "tokens_per_s": {str(busy): round(rate, 1) for busy, rate in rates.items()},
                    "rounds": [round(ratio, 4) for ratio in ratios],
                    "slowdown_pct": round(100 * slowdown, 2),
                    "below_5_pct": slowdown < 0.05,
                },
            )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, seconds=420)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--rows", type=int, default=8192, help="rows of a nano-batch")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--residents", type=int, default=64)
    parser.add_argument("--skip", default="", help="peak,checkpointing,memory,residents")
    given = parser.parse_args(arguments)
    device, skip = torch.device(given.device), given.skip.split(",")
    logging.basicConfig(level=logging.WARNING)
    with figures("gpu_memory", given) as found:
        found.values["settings"] = {
            key: getattr(given, key) for key in ("shape", "rows", "layers", "steps", "residents")
        }
        base = random_model(given.shape, device, layers=given.layers)
        frozen = {"weights_gb": gigabytes(allocated(device))}
        frozen["peak_gb"] = gigabytes(frozen_peak(base, given.rows))
        found.note("frozen", frozen)
        total_rank = 2 * sum(RANKS)
        peaks: dict[str, dict[str, float]] = {}
        if "peak" not in skip:
            model = SuperModel(base, reserve_rows=total_rank, compiled=compiles(given))
            adapters = adapters_of(model, RANKS)
            peaks["plain"] = measure_peak(model, given.rows, given.steps, adapters)
            report_peaks(peaks, frozen, found)
            found.note("within_30_gb", peaks["plain"]["over_frozen_gb"] <= 30)
            if "memory" not in skip and device.type == "cuda":
                found.note(
                    "out_of_memory",
                    measure_out_of_memory(model, given.rows, adapters, peaks["plain"]["peak_gb"]),
                )
            del model, adapters
        del base
        allocated(device)
        if "checkpointing" not in skip:
            base = random_model(given.shape, device, layers=given.layers)
            model = SuperModel(
                base,
                reserve_rows=total_rank,
                gradient_checkpointing=True,
                compiled=compiles(given),
            )
            adapters = adapters_of(model, RANKS)
            for title, keeps in (("recomputed, S kept", True), ("recomputed, S too", False)):
                for group in model.groups:
                    group.keeps = keeps
                peaks[title] = measure_peak(model, given.rows, given.steps, adapters)
            report_peaks(peaks, frozen, found)
            del model, base, adapters
            allocated(device)
        if "residents" not in skip:
            base = random_model(given.shape, device, layers=given.layers)
            rows_of_all = 16 * given.residents
            model = SuperModel(base, reserve_rows=rows_of_all, compiled=compiles(given))
            measure_residents(model, given.rows, given.rounds, given.residents, found)


if __name__ == "__main__":
    main(sys.argv[1:])
