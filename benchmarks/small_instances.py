"""How near the tlora policy comes to the best of all groupings, on instances small enough to try
them all: the usual ones, and hard ones with bounds of 1 to 3 and priorities of 0.5 to 4.

    python benchmarks/small_instances.py
    python benchmarks/small_instances.py --json benchmarks/results/small_instances.jsonl

The policy was developed with other seeds of the hard instances than these.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from simulate_study import commit
from support.instances import HARD, USUAL, gap, instance

KINDS = {"usual": USUAL, "hard": HARD}
FIRST = 50_000
COUNT = 2000


def measured(kind: str, first: int, count: int) -> dict[str, Any]:
    gaps = np.array([gap(*instance(seed, KINDS[kind])) for seed in range(first, first + count)])
    return {
        "kind": kind,
        "first_seed": first,
        "instances": count,
        "mean": float(gaps.mean()),
        "p95": float(np.percentile(gaps, 95)),
        "p99": float(np.percentile(gaps, 99)),
        "max": float(gaps.max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--first", type=int, default=FIRST, help="seed")
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--json", type=Path, help="the line is added to this file")
    options = parser.parse_args()
    rows = [measured(kind, options.first, options.count) for kind in KINDS]
    for row in rows:
        print(
            f"{row['kind']:6} {row['instances']} instances: gap in the mean {row['mean']:.3%}, "
            f"p95 {row['p95']:.2%}, p99 {row['p99']:.2%}, at most {row['max']:.2%}"
        )
    line = {
        "v": 1,
        "kind": "small_instances",
        "commit": commit(),
        "command": " ".join(["python", *sys.argv]),
        "rows": rows,
    }
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
