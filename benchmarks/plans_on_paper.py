"""The plan and its predicted throughput for 8B, 32B and 70B on 1 to 64 H200s: arithmetic on a
measured profile and assumed links, nothing is run.

Prints the table of docs/plans.md; the lines it writes have the best plan and the first candidates
of every case.

    python benchmarks/plans_on_paper.py [--json FILE]
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from tlora.runtime.benchmark.record import commit
from tlora.schedule.paper import JOBS_PER_GPU, PaperPlan, plan_on_paper

SHAPES = ("llama-8b", "qwen-32b", "llama-70b")
GPUS = (1, 2, 4, 8, 16, 32, 64)
FEW_JOBS = 16
KEPT_CANDIDATES = 8
GIB = 2**30
HEADER = (
    "base",
    "GPUs",
    "jobs",
    "replicas x fsdp",
    "adapters",
    "nano-batch",
    "tokens/s",
    "per GPU",
    "GiB",
    "links",
    "not executed yet",
)


def row(paper: PaperPlan) -> list[str]:
    best, world = paper.choice.best, paper.choice.world
    place = [paper.shape, str(world), str(paper.jobs)]
    if best is None:
        return [*place, "nothing fits", *[""] * 7]
    plan, memory = best.plan, best.memory.total
    assert memory is not None
    return [
        *place,
        f"{plan.replicas} x {plan.fsdp}"
        + (f", {plan.kept_layers} kept" if plan.kept_layers else ""),
        plan.adapters if plan.ranks > 1 else "",
        f"{plan.bucket:,}",
        f"{best.tokens_per_s:,.0f}",
        f"{best.tokens_per_s / world:,.0f}",
        f"{memory / GIB:.0f}",
        f"{best.communication_share:.1%}",
        beyond(paper),
    ]


def beyond(paper: PaperPlan) -> str:
    """The best of what is priced and not executed, where it would be faster."""
    first, *others = paper.choice.candidates
    for each in others:
        gain = each.run_tokens_per_s / first.run_tokens_per_s
        if each.price.fits and not each.plan.is_executed and gain > 1.01:
            plan = each.plan
            sizes = {"tp": plan.tp, "pp": plan.pp}
            told = ", ".join(f"{name} {count}" for name, count in sizes.items() if count > 1)
            return f"{gain:.2f}x with {told}"
    return ""


def line(paper: PaperPlan) -> dict[str, Any]:
    whole = paper.as_json()
    candidates = whole.pop("candidates")
    command = shlex.join(["python", *sys.argv])
    return (
        {"commit": commit(), "command": command}
        | whole
        | {"candidates": candidates[:KEPT_CANDIDATES], "num_candidates": len(candidates)}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    path = parser.parse_args().json
    papers = [
        plan_on_paper(shape, gpus, jobs=jobs)
        for per_gpu in (True, False)
        for shape in SHAPES
        for gpus in GPUS
        for jobs in [JOBS_PER_GPU * gpus if per_gpu else FEW_JOBS]
    ]
    print(" | ".join(["", *HEADER, ""]).strip())
    print("|" + "---|" * len(HEADER))
    for paper in papers:
        print(" | ".join(["", *row(paper), ""]).strip())
    if path is not None:
        path.write_text("".join(json.dumps(line(paper)) + "\n" for paper in papers))


if __name__ == "__main__":
    main()
