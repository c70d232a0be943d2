"""What finding the size of nano-batches costs, ours and by the published rule.

    python benchmarks/controller_landscapes.py [--seeds 10] [--draws 60] [--json FILE.jsonl]

First on landscapes that are written down, then on as many draws of each family of others. The last
two rules are for what could be reached: one that knows all rates but not when they change, and one
that also has to try the sizes beside the best. Regret: time over that of one who knew the best size
all along, for the work of 300 nano-batches of 8,192 tokens, the first nano-batch of every size
three times as long (drawn: 1.5 to 6). End: by how much the sizes of the last fifth are slower than
the best. Changes: of the size in the second half of the work. No device is needed; recorded
landscapes are those of one H200.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from tlora.runtime.benchmark.drawn_landscapes import FAMILIES, drawn
from tlora.runtime.benchmark.landscapes import (
    Drive,
    Informed,
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
    "knows": lambda landscape: Informed(landscape),
    "knows, tries beside": lambda landscape: Informed(landscape, neighbours=True),
}


def figures(runs: list[Drive]) -> dict[str, float]:
    regrets = sorted(run.regret for run in runs)
    return {
        "regret": round(statistics.mean(regrets), 4),
        "p95_regret": round(regrets[int(0.95 * len(regrets))], 4),
        "worst_regret": round(regrets[-1], 4),
        "end_loss": round(statistics.mean(run.loss_at_the_end() for run in runs), 4),
        "late_changes": round(statistics.mean(run.late_changes() for run in runs), 1),
        "out_of_memory": max(run.out_of_memory for run in runs),
    }


Found = dict[str, dict[str, dict[str, float]]]
"""By landscape or family, rule and figure."""


def tried(cases: dict[str, list[tuple[Landscape, int]]]) -> Found:
    """Each case is some landscapes with the seeds of their noise."""
    print(f"{'':50}" + "".join(f"{name:>36}" for name in RULES))
    print(f"{'landscape':50}" + f"{'regret   p95  worst   end  changes':>36}" * len(RULES))
    found: Found = {}
    for case, landscapes_and_seeds in cases.items():
        found[case] = {}
        row = f"{case:50}"
        for name, rule in RULES.items():
            runs = [drive(rule(each), each, seed=seed) for each, seed in landscapes_and_seeds]
            each = found[case][name] = figures(runs)
            row += f"{each['regret']:11.1%}{each['p95_regret']:6.0%}{each['worst_regret']:6.0%}"
            row += f"{each['end_loss']:6.1%}{each['late_changes']:7.1f}"
        print(row, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--json", type=Path, help="append one line to this file")
    arguments = parser.parse_args()
    written = {each.name: [(each, s) for s in range(arguments.seeds)] for each in landscapes()}
    families = {name: [(drawn(name, i), i) for i in range(arguments.draws)] for name in FAMILIES}
    found, found_drawn = tried(written), tried(families)
    if arguments.json is not None:
        line = {
            "v": 1,
            "kind": "controller",
            "commit": commit(),
            "command": f"python {shlex.join(sys.argv)}",
            "device": "none: recorded and made-up landscapes",
            "versions": {"python": versions()["python"]},
            "seeds": arguments.seeds,
            "draws": arguments.draws,
            "landscapes": found,
            "drawn": found_drawn,
        }
        with arguments.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
