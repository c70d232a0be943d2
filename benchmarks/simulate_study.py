"""How policies compare on real traces: each policy, several seeds, one factor at a time around the
default. One line of JSON per run; runs that are there already are not repeated, so that a study can
be broken off and gone on with.

    python benchmarks/simulate_study.py --output benchmarks/results/simulate.jsonl
    python benchmarks/simulate_study.py --output benchmarks/results/simulate.jsonl --table

The traces are in the folder named by TLORA_TEST_DATA.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from tlora.simulation.compare import COMPARED, Setting, choose_profile, mean_of, run_one
from tlora.simulation.traces import Trace, read_trace

SEEDS = 5
DEFAULT: dict[str, float] = {"gpus": 128, "load": 0.8, "predictor_error": 0.1, "max_runnable": 128}
SWEEPS: dict[str, tuple[float, ...]] = {
    "gpus": (32, 64, 256),
    "load": (0.5, 1.2),
    "predictor_error": (0.0, 0.3),
    "max_runnable": (512,),
}


@dataclass(frozen=True, slots=True)
class Part:
    """Of a trace: as many jobs as three weeks of 128 GPUs take at a load of 0.8."""

    skip_days: float
    jobs: int


# The first weeks of the Philly trace have next to no jobs, and some of the rest is one burst.
TRACES = {"philly_2017": Part(60.0, 3000), "elasticflow_itp_2021": Part(0.0, 2000)}


@dataclass(frozen=True, slots=True)
class Case:
    trace: str
    gpus: float
    load: float
    predictor_error: float
    policy: str
    seed: int
    jobs: int
    profile: str
    max_runnable: float = 128

    @property
    def place(self) -> tuple[float, ...]:
        """In the order of DEFAULT."""
        return self.gpus, self.load, self.predictor_error, self.max_runnable


def cases(
    *, jobs: int | None, seeds: int, profile: str, policies: list[str], sweeps: bool
) -> list[Case]:
    """The default of every trace first, then one factor after the other."""
    places = [DEFAULT]
    if sweeps:
        places += [DEFAULT | {name: value} for name, values in SWEEPS.items() for value in values]
    return [
        Case(
            trace=trace,
            policy=policy,
            seed=seed,
            jobs=jobs or part.jobs,
            profile=profile,
            **place,
        )
        for place in places
        for seed in range(seeds)
        for trace, part in TRACES.items()
        for policy in policies
    ]


@cache
def trace_of(name: str) -> Trace:
    folder = os.environ.get("TLORA_TEST_DATA")
    if not folder:
        sys.exit("error: TLORA_TEST_DATA must name the folder that holds traces/")
    return read_trace(Path(folder) / "traces" / f"{name}.csv.gz")


@cache
def commit() -> str | None:
    """TLORA_COMMIT where the history is not at hand."""
    if given := os.environ.get("TLORA_COMMIT"):
        return given
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None


def run(case: Case) -> dict[str, Any]:
    name, profile = choose_profile(case.profile)
    setting = Setting(
        trace=trace_of(case.trace).first(jobs=case.jobs, skip_days=TRACES[case.trace].skip_days),
        policies=(case.policy,),
        gpus=int(case.gpus),
        load=case.load,
        predictor_error=case.predictor_error,
        profile_name=name,
        profile=profile,
        max_runnable=int(case.max_runnable),
    )
    began = time.process_time()
    result = run_one(setting, case.policy, case.seed)
    cpu_s = round(time.process_time() - began, 2)
    return (
        {"v": 1, "kind": "simulate_study", "commit": commit()}
        | asdict(case)
        | {
            "cpu_s": cpu_s,
            "turns": len(result.recorder.decided_s),
            "metrics": asdict(result.metrics),
        }
    )


def case_of(line: dict[str, Any]) -> Case:
    return Case(**{name: line[name] for name in Case.__slots__ if name in line})


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def study(path: Path, wanted: list[Case], workers: int) -> None:
    done = {case_of(line) for line in read_lines(path)}
    left = [case for case in wanted if case not in done]
    print(f"{len(wanted)} runs, {len(wanted) - len(left)} of them done", file=sys.stderr)
    with ProcessPoolExecutor(workers) as pool, path.open("a") as file:
        futures = {pool.submit(run, case): case for case in left}
        for number, future in enumerate(as_completed(futures), 1):
            line = future.result()
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            print(f"{number}/{len(left)} {futures[future]} {line['cpu_s']} s", file=sys.stderr)


def tables(lines: list[dict[str, Any]]) -> str:
    """Markdown: for each trace the default in full, then each factor with mean JCT and fairness."""
    out: list[str] = []
    default = tuple(DEFAULT.values())
    for trace in TRACES:
        mine = [line for line in lines if line["trace"] == trace]
        here = grouped(line for line in mine if case_of(line).place == default)
        if not here:
            continue
        seeds = max(len(each) for each in here.values())
        jobs = sorted({line["jobs"] for line in mine})
        out += [
            f"### {trace}",
            "",
            f"{', '.join(f'{count:,}' for count in jobs)} jobs, {DEFAULT['gpus']:.0f} GPUs, load "
            f"{DEFAULT['load']}, predictor error {DEFAULT['predictor_error']:.0%}, mean of {seeds} "
            "seeds.",
            "",
            "| policy | mean JCT h | p50 | p99 | x tlora | queued h | makespan d | tokens/s | "
            "per GPU in use | busy | effective | slowdown p95 | ftf p95 | max | <= 1.1 | moves | "
            "decision ms p99 |",
            "|---|" + "---:|" * 16,
        ]
        ours = here.get("tlora")
        for policy in COMPARED:
            if policy in here:
                out.append(full_row(policy, here[policy], ours))
        out += ["", *sweep_rows(mine), ""]
    return "\n".join(out)


def grouped(lines: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault(line["policy"], []).append(line["metrics"])
    return found


def full_row(policy: str, metrics: list[dict[str, Any]], ours: list[dict[str, Any]] | None) -> str:
    found = mean_of(metrics)
    jct = found["jct_s"]
    against = "" if not ours else f"{jct['mean'] / mean_of(ours)['jct_s']['mean']:.2f}x"
    cells = [
        f"{jct['mean'] / 3600:.2f}",
        f"{jct['p50'] / 3600:.2f}",
        f"{jct['p99'] / 3600:.1f}",
        against,
        f"{found['queue_s']['mean'] / 3600:.2f}",
        f"{found['makespan_s'] / 86400:.1f}",
        f"{found['tokens_per_s'] / 1e3:,.0f}k",
        f"{found['tokens_per_gpu_s']:,.0f}",
        f"{found['util_busy']:.0%}",
        f"{found['util_effective']:.0%}",
        f"{found['slowdown']['p95']:.2f}",
        f"{found['ftf']['p95']:.2f}",
        f"{found['ftf']['max']:.2f}",
        f"{found['ftf_within']:.1%}",
        f"{found['regroups']:,.0f}",
        f"{found['decision_ms']['p99']:.1f}",
    ]
    return f"| {policy} | " + " | ".join(cells) + " |"


def sweep_rows(lines: list[dict[str, Any]]) -> list[str]:
    """Mean JCT in hours of every policy, tlora's fairness beside it."""
    places = [("default", tuple(DEFAULT.values()))]
    for name, values in SWEEPS.items():
        for value in values:
            label = f"{name.replace('_', ' ')} {value:g}"
            places.append((label, tuple((DEFAULT | {name: value}).values())))
    policies = [each for each in COMPARED if any(line["policy"] == each for line in lines)]
    rows = [
        "| mean JCT h | " + " | ".join(policies) + " | tlora: ftf p95 | <= 1.1 | max |",
        "|---|" + "---:|" * (len(policies) + 3),
    ]
    for label, place in places:
        here = grouped(line for line in lines if case_of(line).place == place)
        if not here:
            continue
        cells = [
            f"{fmean(each['jct_s']['mean'] for each in here[policy]) / 3600:.2f}"
            if policy in here
            else ""
            for policy in policies
        ]
        if "tlora" in here:
            ours = mean_of(here["tlora"])
            within, ftf = ours["ftf_within"], ours["ftf"]
            cells += [f"{ftf['p95']:.2f}", f"{within:.1%}", f"{ftf['max']:.2f}"]
        rows.append(f"| {label} | " + " | ".join(cells) + " |")
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--jobs", type=int, help="of each trace; else as many as fit it")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--profile", default=choose_profile(None)[0])
    parser.add_argument("--policies", default=",".join(COMPARED))
    parser.add_argument("--default-only", action="store_true", help="no sweeps")
    parser.add_argument("--table", action="store_true", help="print tables of what is there")
    options = parser.parse_args(arguments)
    if not options.table:
        wanted = cases(
            jobs=options.jobs,
            seeds=options.seeds,
            profile=options.profile,
            policies=options.policies.split(","),
            sweeps=not options.default_only,
        )
        study(options.output, wanted, options.workers)
    print(tables(read_lines(options.output)))


if __name__ == "__main__":
    main()
