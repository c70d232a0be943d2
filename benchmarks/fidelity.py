"""Does a simulated run end when a real one does? `python benchmarks/fidelity.py --json FILE`.

Jobs on the demo base arrive over time at two one-thread worker processes, which stand for two GPUs.
Every policy drives them for real, several times, through the control loop, and once in a simulation
whose costs are the profile of this machine. Makespan, mean and p99 of the completion times must
agree, and the policies must rank alike. Every real run's recorded turns are replayed.

The profile is measured here first, by `tlora profile`'s own code in as many processes at once as
there are workers (they share caches and memory). Then a calibration on other jobs than those of the
comparison, through the same workers, adds what a profile of bare nano-batches cannot know: what a
worker spends around them (a factor and a constant per nano-batch), and what attaching and ending
cost with files. A round of it is run before every real run, so that both see the machine at the
same times. docs/fidelity.md says more. Run it on a machine that does nothing else.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from fidelity_calibration import (
    BASE,
    BATCHES,
    NEVER,
    RANKS,
    Calibration,
    Overheads,
    measure_profile,
    new_job,
    new_spec,
    ready_workers,
    requests_for,
    run_directory,
    say,
)

from tlora.control import Loop, Turn
from tlora.control.protocols import turn_of_json
from tlora.control.replay import replay
from tlora.core.clock import ManualClock, WallClock
from tlora.core.cluster import uniform_cluster
from tlora.core.event import Arrival, Completion, EarlyExit, JobFailure
from tlora.core.job import RunSpec
from tlora.core.request import JobRequest
from tlora.core.state import State
from tlora.costs.groups import Costs
from tlora.costs.profile import Profile, read_profile, write_profile
from tlora.runtime.benchmark import record
from tlora.runtime.environment import quieten_libraries
from tlora.runtime.executors.devices import DeviceExecutor
from tlora.schedule import Settings, make_policy
from tlora.simulation.executor import SimulatedExecutor
from tlora.store.memory import MemoryStore
from tlora.store.sqlite import SqliteStore

POLICIES = ("tlora", "solo", "tlora-no-scheduler")
SETTINGS = Settings(max_replicas=1, min_stay_s=10.0)
TICK_S = 10.0
ROUNDS_BEFORE = 2
"""Of the calibration, for what the policies are told."""

MEMORY_JOBS = 6
"""So many jobs of the mean fit into the memory that a device is said to have: a CPU would hold all,
and a policy that fills memory would have nothing to do."""

LOAD = 4.0
"""Jobs arrive in the first part of a run, so that what a job takes grows as the machine's slowness
does. Were they to arrive over all of it (1.5), a machine that is 5 % slower would give completion
times that are 20 % longer, and repeats of one real run would differ by more than the limits."""

LIMITS_PCT = {"makespan_s": 5.0, "jct_mean_s": 5.0, "jct_p99_s": 10.0}


@dataclass(frozen=True, slots=True)
class Figures:
    makespan_s: float
    jct_mean_s: float
    jct_p99_s: float
    moves: int
    groups: int


def main() -> int:
    options = arguments()
    quieten_libraries()
    with tempfile.TemporaryDirectory(prefix="fidelity-") as folder:
        work = options.keep_runs or Path(folder)
        if options.profile is None:
            measured = measure_profile(options.workers, options.profile_seconds, work)
        else:
            measured = read_profile(options.profile)
        if options.keep_profile is not None:
            write_profile(measured, options.keep_profile)
        say(f"profile: held-out error {measured.heldout_error_pct:.1f} %")
        calibration = Calibration(
            options.workers, measured.budget_tokens, options.calibration_seconds, work
        )
        try:
            for _ in range(ROUNDS_BEFORE):
                calibration.run_round()
            told = calibration.overheads(measured)
            say(f"policies are told: {told.line}")
            spec, requests, costs = workload(told.on(measured), options)
            real, drifts = run_all(spec, requests, costs, calibration, options, work)
            overheads = calibration.overheads(measured)
        finally:
            calibration.close()
        say(f"the simulation is told: {overheads.line}")
        truth = Costs({BASE: with_memory(overheads.on(measured), requests)}, costs.cluster)
        found = {
            policy: compared(figures(simulate(policy, requests, costs, truth)), runs)
            for policy, runs in real.items()
        }
    verdict = judged(found)
    print_table(found, verdict)
    line = {
        "v": 1,
        "kind": "fidelity",
        "commit": record.commit(),
        "command": shlex.join(["python", *sys.argv]),
        "device": f"{options.workers} processes of one thread",
        "versions": record.versions(),
        "jobs": len(requests),
        "repeats": options.repeats,
        "heldout_error_pct": measured.heldout_error_pct,
        "noise_pct": measured.noise_pct,
        "overheads": {name: getattr(overheads, name) for name in Overheads.__slots__},
        "machine_slower_pct": drifts,
        "policies": found,
        **verdict,
    }
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return 0 if verdict["holds"] else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Simulated runs against real ones.")
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--seconds", type=float, default=8.0, help="of the mean job, alone")
    parser.add_argument("--load", type=float, default=LOAD, help="demanded over given devices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", type=Path, help="a profile of this machine, made before")
    parser.add_argument("--keep-profile", type=Path, help="write the measured profile here")
    parser.add_argument("--keep-runs", type=Path, help="an empty folder for all runs' files")
    parser.add_argument("--profile-seconds", type=float, default=60.0)
    parser.add_argument(
        "--calibration-seconds", type=float, default=3.0, help="for each group, each time"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def workload(
    profile: Profile, options: argparse.Namespace
) -> tuple[RunSpec, list[JobRequest], Costs]:
    """Ranks, batches and lengths of run as users' jobs have them, most of them short; arrivals at
    random so that the load is what was asked for."""
    generator = np.random.Generator(np.random.PCG64(options.seed))
    ranks = generator.choice(RANKS, options.jobs)
    batches = generator.choice(BATCHES, options.jobs)
    seconds = generator.gamma(2.0, options.seconds / 2.0, options.jobs).clip(options.seconds / 4)
    drafts = [
        new_job(f"j{i:02d}", i, rank=int(ranks[i]), batch=int(batches[i]), steps=NEVER)
        for i in range(options.jobs)
    ]
    cluster = uniform_cluster(options.workers)
    costs = Costs({BASE: profile}, cluster)
    for draft, request, each in zip(drafts, requests_for(new_spec(drafts)), seconds, strict=True):
        steps = max(5, round(each / costs.figures(request).solo_step_s))
        draft["train"]["max_steps"] = steps
    spec = new_spec(drafts, warm=options.workers)
    span = float(seconds.sum()) / options.workers / options.load
    arrivals = np.sort(generator.uniform(0.0, span, options.jobs))
    arrivals[0] = 0.0
    requests = [
        replace(request, arrival_s=round(float(at), 3))
        for request, at in zip(requests_for(new_spec(drafts)), arrivals, strict=True)
    ]
    return spec, requests, Costs({BASE: with_memory(profile, requests)}, cluster)


def with_memory(profile: Profile, requests: Sequence[JobRequest]) -> Profile:
    parameters = profile.parameters_per_rank * statistics.mean(r.load.rank for r in requests)
    adapters = MEMORY_JOBS * profile.memory.adapters_bytes(parameters)
    row = adapters / profile.budget_tokens / 4
    memory = replace(
        profile.memory,
        device_bytes=round((profile.memory.weights_bytes + adapters * 1.25) / 0.95),
        outside_bytes=0,
        fixed_bytes=0.0,
        row_bytes=row,
        reserve_bytes=0.0,
    )
    return replace(profile, memory=memory)


@dataclass(frozen=True, slots=True)
class RealRun:
    figures: Figures
    replayed: bool
    """Its recorded turns gave the same decisions again."""


def run_all(
    spec: RunSpec,
    requests: list[JobRequest],
    costs: Costs,
    calibration: Calibration,
    options: argparse.Namespace,
    work: Path,
) -> tuple[dict[str, list[RealRun]], list[float]]:
    """Every policy in turn, each time in another order, a round of the calibration before each;
    and how much slower than at first the machine was in each of these rounds."""
    policies = options.policies.split(",")
    found: dict[str, list[RealRun]] = {policy: [] for policy in policies}
    drifts: list[float] = []
    for repeat in range(options.repeats):
        first = repeat % len(policies)
        for policy in [*policies[first:], *policies[:first]]:
            drifts.append(calibration.run_round())
            root = run_directory(spec, work / f"{policy}-{repeat}")
            turns = run_for_real(policy, requests, costs, root, options.workers)
            difference = replay(
                turns,
                state=State(costs.cluster),
                policy=make_policy(policy, fresh(costs), SETTINGS),
            )
            run = RealRun(figures(turns), difference is None)
            found[policy].append(run)
            say(
                f"{policy}, repeat {repeat + 1}: makespan {run.figures.makespan_s:.1f} s, mean JCT "
                f"{run.figures.jct_mean_s:.1f} s (machine {drifts[-1]:+.1f} % before); replay "
                f"{difference or 'gives the same decisions'}"
            )
    return found, drifts


def compared(simulated: Figures, runs: Sequence[RealRun]) -> dict[str, Any]:
    errors = {}
    for name in LIMITS_PCT:
        mean = statistics.mean(getattr(run.figures, name) for run in runs)
        errors[name] = (getattr(simulated, name) / mean - 1) * 100
    return {
        "simulated": as_dict(simulated),
        "real": [as_dict(run.figures) for run in runs],
        "error_pct": errors,
        "replayed": sum(run.replayed for run in runs),
    }


def fresh(costs: Costs) -> Costs:
    """Nothing that one run worked out is known to another."""
    return Costs({BASE: costs.profile(BASE)}, costs.cluster)


def simulate(policy: str, requests: list[JobRequest], told: Costs, truth: Costs) -> list[Turn]:
    """The policy believes what it believed in the real runs; time passes as measured over all of
    them."""
    clock = ManualClock()
    store: MemoryStore[Turn] = MemoryStore()
    loop = Loop(
        state=State(told.cluster),
        policy=make_policy(policy, fresh(told), SETTINGS),
        executor=SimulatedExecutor(clock=clock, costs=fresh(truth), arrivals=requests),
        store=store,
        clock=clock,
        tick_s=TICK_S,
    )
    loop.run()
    return list(store.turns())


def run_for_real(
    policy: str, requests: list[JobRequest], costs: Costs, root: Path, workers: int
) -> list[Turn]:
    devices = ready_workers(root, workers)
    store: SqliteStore[Turn] = SqliteStore(
        root / "state.sqlite", decode=turn_of_json, about={"policy": policy}
    )
    clock = WallClock()
    executor = DeviceExecutor(devices, clock=clock, arrivals=requests)
    loop = Loop(
        state=State(costs.cluster),
        policy=make_policy(policy, fresh(costs), SETTINGS),
        executor=executor,
        store=store,
        clock=clock,
        tick_s=TICK_S,
    )
    try:
        loop.run()
    finally:
        executor.close()
    turns = list(store.turns())
    store.close()
    return turns


def figures(turns: Sequence[Turn]) -> Figures:
    """Completion times count from the arrival that was planned."""
    arrived: dict[str, float] = {}
    taken: list[float] = []
    last = 0.0
    for turn in turns:
        for event in turn.events:
            assert not isinstance(event, JobFailure | EarlyExit), event
            if isinstance(event, Arrival):
                arrived[event.request.name] = event.request.arrival_s
            elif isinstance(event, Completion):
                taken.append(event.time - arrived[event.job])
                last = max(last, event.time)
    assert len(taken) == len(arrived)
    decisions = [decision for turn in turns for decision in turn.decisions]
    return Figures(
        makespan_s=last,
        jct_mean_s=statistics.mean(taken),
        jct_p99_s=float(np.quantile(taken, 0.99)),
        moves=sum(each.kind in ("move", "pause") for each in decisions),
        groups=sum(each.kind == "start" for each in decisions),
    )


def as_dict(found: Figures) -> dict[str, float]:
    return {name: getattr(found, name) for name in Figures.__slots__}


def judged(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    within = all(
        abs(each["error_pct"][name]) <= limit
        for each in found.values()
        for name, limit in LIMITS_PCT.items()
    )
    ranks = {name: (ranking(found, name, real=True), ranking(found, name)) for name in LIMITS_PCT}
    turned = {name: turned_pairs(found, name) for name in LIMITS_PCT}
    replays = all(each["replayed"] == len(each["real"]) for each in found.values())
    same = not any(beyond for pairs in turned.values() for _, _, beyond in pairs)
    return {
        "ranking": {name: list(real) for name, (real, _) in ranks.items()},
        "turned_within_noise": {
            name: [[one, other] for one, other, beyond in pairs if not beyond]
            for name, pairs in turned.items()
        },
        "same_ranking": same,
        "within_limits": within,
        "replays_agree": replays,
        "holds": within and same and replays,
    }


def turned_pairs(found: dict[str, dict[str, Any]], name: str) -> list[tuple[str, str, bool]]:
    """Policies that the simulation has the other way round, and whether they truly differ: by more
    than the repeats of either do."""
    turned: list[tuple[str, str, bool]] = []
    for one, other in combinations(found, 2):
        real = statistics.mean(values(found, one, name)) - statistics.mean(
            values(found, other, name)
        )
        simulated = found[one]["simulated"][name] - found[other]["simulated"][name]
        if real * simulated < 0:
            noise = max(np.ptp(values(found, policy, name)) for policy in (one, other))
            turned.append((one, other, bool(abs(real) > noise)))
    return turned


def values(found: dict[str, dict[str, Any]], policy: str, name: str) -> list[float]:
    return [run[name] for run in found[policy]["real"]]


def ranking(found: dict[str, dict[str, Any]], name: str, *, real: bool = False) -> tuple[str, ...]:
    def value(policy: str) -> float:
        if real:
            return statistics.mean(values(found, policy, name))
        return found[policy]["simulated"][name]

    return tuple(sorted(found, key=value))


def print_table(found: dict[str, dict[str, Any]], verdict: dict[str, Any]) -> None:
    print(f"\n{'policy':20}{'':12}{'real':>10}{'spread':>9}{'simulated':>12}{'error':>9}")
    for policy, each in found.items():
        for name, limit in LIMITS_PCT.items():
            runs = values(found, policy, name)
            mean = statistics.mean(runs)
            spread = (max(runs) - min(runs)) / mean * 100
            error = each["error_pct"][name]
            mark = "" if abs(error) <= limit else f"  above {limit:g} %"
            print(
                f"{policy:20}{name:12}{mean:8.1f} s{spread:7.1f} %{each['simulated'][name]:10.1f} s"
                f"{error:+7.1f} %{mark}"
            )
    for name in ("same_ranking", "replays_agree", "within_limits"):
        print(f"{name.replace('_', ' ')}: {'yes' if verdict[name] else 'NO'}")
    for name, pairs in verdict["turned_within_noise"].items():
        for one, other in pairs:
            print(f"alike: {one} and {other} in {name}, by less than repeats differ")


if __name__ == "__main__":
    sys.exit(main())
