"""What finding the size of nano-batches costs, ours and by the published rule.

    python benchmarks/controller_landscapes.py [--seeds 10] [--json benchmarks/results/FILE.jsonl]

Regret: time over that of one who knew the best size all along, for the work of 300 nano-batches of
8,192 tokens, the first nano-batch of every size three times as long. End: by how much the sizes of
the last fifth are slower than the best. Changes: of the size in the second half of the work. No
device is needed; recorded landscapes are those of one H200.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from tlora.runtime.benchmark.landscapes import (
    Drive,
    Landscape,
    PublishedRule,
    Rule,
    drive,
    landscapes,
    ours,
)
from tlora.runtime.benchmark.record import commit, versions

RULES: dict[str, Callable[[Landscape], Rule]] = {
    "ours": ours,
    "published": lambda landscape: PublishedRule(landscape),
    "published, tau 2%": lambda landscape: PublishedRule(landscape, tau=0.02),
}


def figures(runs: list[Drive]) -> dict[str, float]:
    return {
        "regret": round(statistics.mean(run.regret for run in runs), 4),
        "worst_regret": round(max(run.regret for run in runs), 4),
        "end_loss": round(statistics.mean(run.loss_at_the_end() for run in runs), 4),
        "late_changes": round(statistics.mean(run.late_changes() for run in runs), 1),
        "out_of_memory": max(run.out_of_memory for run in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="append one line to this file")
    arguments = parser.parse_args()
    print(f"{'':50}" + "".join(f"{name:>30}" for name in RULES))
    print(f"{'landscape':50}" + f"{'regret  worst   end  changes':>30}" * len(RULES))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for landscape in landscapes():
        found[landscape.name] = {}
        row = f"{landscape.name:50}"
        for name, rule in RULES.items():
            runs = [drive(rule(landscape), landscape, seed=seed) for seed in range(arguments.seeds)]
            each = found[landscape.name][name] = figures(runs)
            row += f"{each['regret']:9.1%}{each['worst_regret']:7.0%}"
            row += f"{each['end_loss']:6.1%}{each['late_changes']:8.1f}"
        print(row, flush=True)
    if arguments.json is not None:
        line = {
            "v": 1,
            "kind": "controller",
            "commit": commit(),
            "command": f"python {shlex.join(sys.argv)}",
            "device": "none: recorded and made-up landscapes",
            "versions": {"python": versions()["python"]},
            "seeds": arguments.seeds,
            "landscapes": found,
        }
        with arguments.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
