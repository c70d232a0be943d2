"""What it saves that a job which is served has a turn of several sequences: the same jobs, in turns
of more and of less.

    python benchmarks/turns.py [--shape llama-8b] [--json benchmarks/results/turns.jsonl]

Turns end with the sequence that makes them this part of the budget; `1 sequence` is no turn at all,
as composing was before there were any. Every number of jobs is one line: tokens per second of each,
the median of rounds in which all take part, and how many jobs a nano-batch has.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tlora.runtime.benchmark import record, shapes
from tlora.runtime.benchmark.arms import Counter, train_together
from tlora.runtime.benchmark.bench import chosen_device, with_defaults, workload_for
from tlora.runtime.benchmark.lineup import new_lineup
from tlora.runtime.benchmark.settings import Settings
from tlora.runtime.environment import quieten_libraries
from tlora.training import compose
from tlora.training.outcome import Outcome

ONE_SEQUENCE = 1 << 30


class Members(Counter):
    """And how many jobs each nano-batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.members: list[int] = []

    def on_nano_batch(self, outcome: Outcome) -> None:
        super().on_nano_batch(outcome)
        self.members.append(len(outcome.tokens))


@contextmanager
def turns_of(parts: int) -> Iterator[None]:
    before, compose.TURNS = compose.TURNS, parts
    try:
        yield
    finally:
        compose.TURNS = before


def measure(settings: Settings, parts: list[int], repeats: int) -> dict[str, object]:
    device = chosen_device(settings.device)
    settings = with_defaults(settings, device)
    assert settings.shape and settings.budget
    shape = shapes.look_at(settings.shape, settings.dtype, device)
    work = workload_for(settings, shape)
    lineup = new_lineup(settings, shapes.load(shape, device), work, until=float("inf"))
    members: dict[int, float] = {}
    for each in parts:
        with turns_of(each):
            lineup.warm_fused()
            counter = Members()
            train_together(
                lineup.ours, work, work.jobs, settings.budget, counter, adapters=lineup.adapters
            )
            members[each] = statistics.mean(counter.members)
    seconds: dict[int, list[float]] = {each: [] for each in parts}
    for number in range(repeats):
        # Backwards in every other round: what drifts meets all of them.
        for each in parts if number % 2 == 0 else reversed(parts):
            with turns_of(each):
                seconds[each].append(lineup.fused().seconds)
    return {
        "jobs": settings.jobs,
        "batch": settings.batch,
        "ranks": settings.ranks,
        "nano_batch_tokens": settings.budget,
        "tokens": work.tokens,
        "turns": {
            name_of(each): {
                "tokens_per_s": round(work.tokens / statistics.median(seconds[each]), 1),
                "seconds": [round(s, 4) for s in seconds[each]],
                "jobs_per_nano_batch": round(members[each], 2),
            }
            for each in parts
        },
    }


def name_of(parts: int) -> str:
    return "1 sequence" if parts == ONE_SEQUENCE else f"1/{parts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", help="as tlora bench takes it")
    parser.add_argument("--jobs", type=int, nargs="+", default=[8, 24, 48])
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--parts", type=int, nargs="+", default=[16, 8, 4, 2])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--lengths", help="as tlora bench takes it")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--json", type=Path, help="append one line to this file")
    options = parser.parse_args()
    quieten_libraries()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    parts = [ONE_SEQUENCE, *options.parts]
    print(f"{'jobs':>6}" + "".join(f"{name_of(each):>24}" for each in parts))
    found: list[dict[str, object]] = []
    for jobs in options.jobs:
        settings = Settings(
            shape=options.shape,
            jobs=jobs,
            ranks=tuple(options.ranks),
            batch=tuple(options.batch),
            steps=options.steps,
            budget=options.budget,
            lengths=options.lengths,
            skip_compile=not torch.cuda.is_available(),
        )
        line = measure(settings, parts, options.repeats)
        cells = [
            f"{each['tokens_per_s']:12,.0f} ({each['jobs_per_nano_batch']:.1f} jobs)"
            for each in line["turns"].values()
        ]
        print(f"{jobs:6}" + "".join(f"{cell:>24}" for cell in cells), flush=True)
        found.append(line)
    if options.json is not None:
        line = {
            "v": 1,
            "kind": "turns",
            "commit": record.commit(),
            "command": f"python {shlex.join(sys.argv)}",
            "device": torch.cuda.get_device_name()
            if torch.cuda.is_available()
            else "cpu, one thread",
            "versions": record.versions(),
            "results": found,
        }
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
