"""Who is in the nano-batches that the engine composes of many jobs, whose batch begins there, and
how many meet in a block of tokens.

    python benchmarks/composed_jobs.py LENGTHS.npz --json benchmarks/results/composed_jobs.jsonl

The gradients of a job whose batch begins are zero, and the kernels do not read them. A product that
takes the update inside has room for some jobs in a block of tokens (`pages.py`). LENGTHS holds
arrays of token lengths by name, or is a text file as `tlora bench --lengths` takes it. Counted, not
measured: one line for each array and sizes of batches.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import accumulate, islice, pairwise, product
from pathlib import Path
from random import Random

import numpy as np
from composed_batch import Job, nano_batches

from tlora.kernels.multi_lora.pages import BLOCK
from tlora.runtime.benchmark.settings import read_lengths

RANKS = (8, 64, 16, 32)
BATCHES = ((1,), (2,), (4,), (8,), (1, 2, 4))
"""Sequences, given to jobs in turn."""
FIRST, COUNT = 20, 200
"""Nano-batches that are counted: not the first ones, where all jobs begin at once."""


def counted(lengths: Sequence[int], batches: Sequence[int], jobs: int, budget: int) -> dict:
    """Of nano-batches: how many jobs are in one, and where most of all are, how many of them do
    not begin."""
    all_jobs = [
        Job(lengths, RANKS[i % len(RANKS)], batches[i % len(batches)], Random(i))
        for i in range(jobs)
    ]
    many = 3 * jobs // 4
    present, going_on, in_blocks = [], [], []
    for _, parts in islice(nano_batches(all_jobs, budget), FIRST, FIRST + COUNT):
        present.append(len(parts))
        in_blocks += jobs_in_blocks([part.tokens for part in parts])
        if len(parts) >= many:
            going_on.append(sum(not part.begins for part in parts))
    return {
        "jobs_mean": round(sum(present) / len(present), 1),
        "jobs_most": max(present),
        "with_many": len(going_on),
        "many": many,
        "going_on_most": max(going_on, default=0),
        "going_on_mean": round(sum(going_on) / max(1, len(going_on)), 2),
        "in_block_most": max(in_blocks),
        "in_block_mean": round(sum(in_blocks) / len(in_blocks), 2),
    }


def jobs_in_blocks(tokens: Sequence[int]) -> list[int]:
    """Of each block with tokens of anybody, how many jobs it has; they lie one behind the other."""
    edges = list(accumulate(tokens, initial=0))
    counts = [0] * -(-edges[-1] // BLOCK)
    for start, stop in pairwise(edges):
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            counts[block] += 1
    return counts


def read_all(path: str, budget: int) -> dict[str, list[int]]:
    """By name, what fits a nano-batch."""
    if not path.endswith(".npz"):
        return {Path(path).stem: [n for n in read_lengths(path) if n <= budget]}
    with np.load(path) as arrays:  # NumPy refuses to unpickle unless it is asked to.
        found = {name: [int(n) for n in arrays[name] if 2 <= n <= budget] for name in arrays}
    return {name: lengths for name, lengths in found.items() if lengths}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("lengths")
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--json", help="append the lines here")
    args = parser.parse_args()
    command = f"composed_jobs.py {Path(args.lengths).name} --jobs {args.jobs}"
    lines = []
    for (name, lengths), batches in product(read_all(args.lengths, args.budget).items(), BATCHES):
        found = counted(lengths, batches, args.jobs, args.budget)
        case = {"lengths": name, "batches": batches, "jobs": args.jobs, "budget": args.budget}
        lines.append({"kind": "composed_jobs", "command": command, **case, **found})
        print(
            f"{name:24} batches {batches!s:10} {found['jobs_mean']:5} jobs, at most"
            f" {found['jobs_most']}; {found['with_many']} of {COUNT} with {found['many']} or more:"
            f" at most {found['going_on_most']} go on, {found['going_on_mean']} on average;"
            f" {found['in_block_mean']} in a block, at most {found['in_block_most']}"
        )
    most = max(line["going_on_most"] for line in lines)
    print(f"where {3 * args.jobs // 4} or more are present, at most {most} go on")
    print(f"at most {max(line['in_block_most'] for line in lines)} jobs in a block")
    if args.json:
        with open(args.json, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
