"""How even the adapters' work is from one nano-batch to the next, with levelling and without.

    python benchmarks/rank_levelling.py LENGTHS.npz [--json benchmarks/results/FILE.jsonl]

LENGTHS.npz holds the token lengths of data sets, one array each. Jobs of rank 8 to 64 and batches
of 1 to 8 rows share nano-batches; without levelling they are composed as if all ranks were one.
Spread: standard deviation over mean of the sum of tokens x rank. Slowest of 4: its mean excess over
the mean, among four nano-batches in a row: what ranks that each run one of them and meet after it
would wait for the adapters' part. Share error: the largest distance of a job's tokens from an equal
share; jobs of small batches cannot use theirs, so it tells something of batches of 64 rows only.
"""

import argparse
import json
import shlex
import statistics
import sys
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
from composed_batch import Composer, Job, as_the_engine, nano_batches

from tlora.runtime.benchmark.record import commit, versions
from tlora.training.compose import Composition, Waiting

RANKS = (8, 16, 32, 64)
BATCHES = (1, 2, 4, 8)
ROUNDS = 600
GROUP = 4


def blind(waiting: list[Waiting], budget: int) -> Composition | None:
    same = [Waiting(w.job, w.kind, w.lengths, w.weight, w.credit, 1) for w in waiting]
    return as_the_engine(same, budget)


def jobs_of(count: int, lengths: dict[str, list[int]], batches: tuple[int, ...]) -> list[Job]:
    names = sorted(lengths)
    draw = Random(count)
    return [
        Job(
            lengths=lengths[draw.choice(names)],
            rank=draw.choice(RANKS),
            batch=draw.choice(batches),
            random=Random(at),
        )
        for at in range(count)
    ]


def measure(jobs: list[Job], composer: Composer, budget: int) -> dict[str, float]:
    work: list[int] = []
    useful = rows = 0
    had = [0] * len(jobs)
    for composition, parts in islice(nano_batches(jobs, budget, composer), ROUNDS):
        work.append(sum(part.tokens * jobs[part.job].rank for part in parts))
        for part in parts:
            had[part.job] += part.tokens
        useful += composition.tokens
        rows += composition.rows
    mean = statistics.mean(work)
    groups = [work[at : at + GROUP] for at in range(0, len(work), GROUP)]
    due = sum(had) / len(jobs)
    return {
        "spread": round(statistics.pstdev(work) / mean, 4),
        "slowest_of_4": round(statistics.mean(max(g) / statistics.mean(g) - 1 for g in groups), 4),
        "padding": round(1 - useful / rows, 4),
        "share_error": round(max(abs(tokens / due - 1) for tokens in had), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lengths", type=Path)
    parser.add_argument("--longest", type=int, default=2048, help="rows are cut to so many tokens")
    parser.add_argument("--json", type=Path, help="append one line to this file")
    arguments = parser.parse_args()
    with np.load(arguments.lengths) as arrays:
        lengths = {
            name: np.minimum(arrays[name], arguments.longest).tolist() for name in arrays.files
        }
    print(f"{'':34}{'spread':>16}{'slowest of 4':>18}{'padding':>18}{'share error':>18}")
    print(
        f"{'jobs, rows a batch, budget':34}" + f"{'blind  level':>16}" + f"{'blind  level':>18}" * 3
    )
    found: list[dict[str, object]] = []
    for count, batches, budget in [
        (8, BATCHES, 2048),
        (8, BATCHES, 8192),
        (16, BATCHES, 8192),
        (64, BATCHES, 8192),
        (8, (64,), 8192),
        (16, (64,), 8192),
    ]:
        without = measure(jobs_of(count, lengths, batches), blind, budget)
        with_it = measure(jobs_of(count, lengths, batches), as_the_engine, budget)
        case = f"{count}, {'-'.join(str(b) for b in sorted({batches[0], batches[-1]}))}, {budget}"
        cells = [f"{without[name]:.1%}  {with_it[name]:.1%}" for name in without]
        print(f"{case:34}" + f"{cells[0]:>16}" + "".join(f"{cell:>18}" for cell in cells[1:]))
        setting = {"jobs": count, "batch": batches, "nano_batch_tokens": budget}
        found.append({**setting, "unlevelled": without, "levelled": with_it})
    if arguments.json is not None:
        line = {
            "v": 1,
            "kind": "rank_levelling",
            "commit": commit(),
            "command": f"python {shlex.join(sys.argv)}",
            "device": "none: composing alone",
            "versions": {"python": versions()["python"]},
            "ranks": RANKS,
            "longest": arguments.longest,
            "results": found,
        }
        with arguments.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
