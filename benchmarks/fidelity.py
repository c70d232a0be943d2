"""Does a simulated run end when a real one does? `python benchmarks/fidelity.py --json FILE`.

Jobs on the demo base arrive over time at two one-thread worker processes, which stand for two GPUs.
Every policy drives them for real, several times, through the control loop, and in simulations whose
costs are the profile of this machine. Makespan, mean and p99 of the completion times must agree,
and the policies must rank alike. Every real run's recorded turns are replayed.

The profile is measured here first, by `tlora profile`'s own code in as many processes at once as
there are workers (they share caches and memory). Then a calibration on other jobs than those of the
comparison, through the same workers, adds what a profile of bare nano-batches cannot know: what a
worker spends around them, and what attaching and ending cost with files. A round of it is run
before every real run and after the last, and a probe runs all the time: what it took in a run, by
the line through the rounds, is how fast the machine was, and a policy is simulated at the speeds of
its real runs. What prices of single groups miss in whole runs is told by two trial runs of other
jobs. docs/fidelity.md says more. Run it on a machine that does nothing else.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fidelity_calibration import (
    BASE,
    BATCHES,
    NEVER,
    RANKS,
    Calibration,
    Span,
    measure_profile,
    new_job,
    new_spec,
    ready_workers,
    requests_for,
    run_directory,
    say,
)
from fidelity_overheads import Overheads
from fidelity_prices import NanoBatches, RunBatch, price_error_pct
from fidelity_probe import Probe, Speeds
from fidelity_verdict import LIMITS_PCT, judged, print_table

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
from tlora.simulation.composed import ComposedCosts
from tlora.simulation.executor import SimulatedExecutor
from tlora.store.memory import MemoryStore
from tlora.store.sqlite import SqliteStore

POLICIES = ("tlora", "solo", "fifo-memory")
SETTINGS = Settings(max_replicas=1, min_stay_s=10.0)
TICK_S = 10.0
ROUNDS_BEFORE = 2
"""Of the calibration, for what the policies are told."""

TRIAL_POLICY = "tlora-no-scheduler"
"""Of the two runs, of other jobs and before and after all others, that say what prices of single
groups miss in whole runs."""

MEMORY_JOBS = 6
"""So many jobs of the mean fit into the memory that a device is said to have: a CPU would hold all,
and a policy that fills memory would have nothing to do."""

LOAD = 4.0
"""Jobs arrive in the first part of a run, so that what a job takes grows as the machine's slowness
does. Were they to arrive over all of it (1.5), a machine that is 5 % slower would give completion
times that are 20 % longer, and repeats of one real run would differ by more than the limits."""


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
        work.mkdir(parents=True, exist_ok=True)
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
        probe = Probe(work)
        try:
            for _ in range(ROUNDS_BEFORE):
                calibration.run_round()
            told = calibration.overheads(measured)
            say(f"policies are told: {told.line}")
            jobs = workload(told.on(measured), options)
            others = workload(told.on(measured), options, seed=options.seed + 1)
            real, trials, drifts = run_all(jobs, others, calibration, options, work)
            overheads = calibration.overheads(measured)
        finally:
            probe.close()
            calibration.close()
    speeds = Speeds(calibration, probe)
    say(f"the simulation is told: {overheads.line}")
    trial = Simulator(measured, overheads, others)
    missed = [trial.price_error_pct(run, statistics.mean(speeds.during(run))) for run in trials]
    say(f"nano-batches of the trial runs are priced {missed[0]:+.1f} and {missed[1]:+.1f} % off")
    simulator = Simulator(measured, overheads, jobs, statistics.mean(missed) / 100)
    found = {policy: compared(policy, runs, simulator, speeds) for policy, runs in real.items()}
    verdict = judged(found)
    print_table(found, verdict)
    line = {
        "v": 1,
        "kind": "fidelity",
        "commit": record.commit(),
        "command": shlex.join(["python", *sys.argv]),
        "device": f"{options.workers} processes of one thread",
        "versions": record.versions(),
        "jobs": len(jobs.requests),
        "repeats": options.repeats,
        "heldout_error_pct": measured.heldout_error_pct,
        "noise_pct": measured.noise_pct,
        "overheads": overheads.as_json,
        "machine_slower_pct": drifts,
        "probe": speeds.as_json,
        "trials": {
            "policy": TRIAL_POLICY,
            "real": [as_dict(run.figures) for run in trials],
            "price_error_pct": missed,
        },
        "policies": found,
        **verdict,
    }
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return 0 if verdict["holds"] else 1


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Simulated runs against real ones.")
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--seconds", type=float, default=8.0, help="of the mean job, alone")
    parser.add_argument("--load", type=float, default=LOAD, help="demanded over given devices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", type=Path, help="a profile of this machine, made before")
    parser.add_argument("--keep-profile", type=Path, help="write the measured profile here")
    parser.add_argument("--keep-runs", type=Path, help="a folder for all runs' files")
    parser.add_argument("--profile-seconds", type=float, default=60.0)
    parser.add_argument(
        "--calibration-seconds", type=float, default=3.0, help="for each group, each time"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


class Workload(NamedTuple):
    spec: RunSpec
    requests: list[JobRequest]
    costs: Costs
    """What policies believe."""


def workload(profile: Profile, options: argparse.Namespace, *, seed: int | None = None) -> Workload:
    """Ranks, batches and lengths of run as users' jobs have them, most of them short; arrivals at
    random so that the load is what was asked for."""
    generator = np.random.Generator(np.random.PCG64(options.seed if seed is None else seed))
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
    return Workload(spec, requests, Costs({BASE: with_memory(profile, requests)}, cluster))


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

    batches: list[RunBatch]
    round_before: int
    """Of the calibration; the next one came after it."""

    span: Span


def run_all(
    jobs: Workload,
    others: Workload,
    calibration: Calibration,
    options: argparse.Namespace,
    work: Path,
) -> tuple[dict[str, list[RealRun]], list[RealRun], list[float]]:
    """Every policy in turn, each time in another order, between two trial runs of other jobs; and
    how much slower than at first the machine was in the calibration's round before each and after
    the last."""
    policies = options.policies.split(",")
    found: dict[str, list[RealRun]] = {policy: [] for policy in policies}
    drifts: list[float] = []

    def run(policy: str, these: Workload, name: str) -> RealRun:
        drifts.append(calibration.run_round())
        done = run_once(policy, these, work / name, options.workers, calibration.rounds - 1)
        say(
            f"{name}: makespan {done.figures.makespan_s:.1f} s, mean JCT "
            f"{done.figures.jct_mean_s:.1f} s (machine {drifts[-1]:+.1f} % before); replay gives "
            f"{'the same' if done.replayed else 'OTHER'} decisions"
        )
        return done

    trials = [run(TRIAL_POLICY, others, "trial-0")]
    for repeat in range(options.repeats):
        first = repeat % len(policies)
        for policy in [*policies[first:], *policies[:first]]:
            found[policy].append(run(policy, jobs, f"{policy}-{repeat}"))
    trials.append(run(TRIAL_POLICY, others, "trial-1"))
    drifts.append(calibration.run_round())
    return found, trials, drifts


def run_once(
    policy: str, these: Workload, folder: Path, workers: int, round_before: int
) -> RealRun:
    batches = NanoBatches()
    root = run_directory(these.spec, folder)
    turns, span = run_for_real(policy, these.requests, these.costs, root, workers, batches)
    difference = replay(
        turns,
        state=State(these.costs.cluster),
        policy=make_policy(policy, fresh(these.costs), SETTINGS),
    )
    return RealRun(figures(turns), difference is None, batches.kept, round_before, span)


@dataclass(frozen=True, slots=True)
class Simulator:
    profile: Profile
    overheads: Overheads
    jobs: Workload
    missed: float = 0.0
    """By so much prices were too high in the trial runs."""

    def truth(self, slower: float) -> Profile:
        slower = (1 + slower) / (1 + self.missed) - 1
        profile = self.overheads.slower(slower).on(self.profile)
        return with_memory(profile, self.jobs.requests)

    def run(self, policy: str, slower: float = 0.0) -> Figures:
        """On a machine that is slower by so much than on average."""
        told = self.jobs.costs
        truth = ComposedCosts({BASE: self.truth(slower)}, told.cluster)
        clock = ManualClock()
        store: MemoryStore[Turn] = MemoryStore()
        loop = Loop(
            state=State(told.cluster),
            policy=make_policy(policy, fresh(told), SETTINGS),
            executor=SimulatedExecutor(clock=clock, costs=truth, arrivals=self.jobs.requests),
            store=store,
            clock=clock,
            tick_s=TICK_S,
        )
        loop.run()
        return figures(list(store.turns()))

    def price_error_pct(self, run: RealRun, slower: float) -> float:
        loads = {request.name: request.load for request in self.jobs.requests}
        return price_error_pct(run.batches, loads, self.truth(slower))


def compared(
    policy: str, runs: Sequence[RealRun], simulator: Simulator, speeds: Speeds
) -> dict[str, Any]:
    """The simulated figures are means over the speeds that were seen for every real run: who is
    grouped with whom hangs on moments, so that a machine that is a hundredth slower may end a run a
    tenth later."""
    around = [speeds.during(run) for run in runs]
    simulated = [simulator.run(policy, slower) for speeds in around for slower in speeds]
    by_rounds = [simulator.run(policy, slower) for run in runs for slower in speeds.around(run)]
    once = simulator.run(policy)
    mean = means(simulated)
    return {
        "simulated": mean,
        "simulated_runs": [as_dict(each) for each in simulated],
        "simulated_at_mean_speed": as_dict(once),
        "real": [as_dict(run.figures) for run in runs],
        "slower_pct": [statistics.mean(each) * 100 for each in around],
        "slower_by_rounds_pct": [statistics.mean(speeds.around(run)) * 100 for run in runs],
        "error_pct": errors_pct(mean, runs),
        "error_by_rounds_pct": errors_pct(means(by_rounds), runs),
        "error_at_mean_speed_pct": errors_pct(as_dict(once), runs),
        "price_error_pct": [
            simulator.price_error_pct(run, statistics.mean(slower))
            for run, slower in zip(runs, around, strict=True)
        ],
        "replayed": sum(run.replayed for run in runs),
    }


def means(simulated: Sequence[Figures]) -> dict[str, float]:
    return {
        name: statistics.mean(getattr(each, name) for each in simulated)
        for name in Figures.__slots__
    }


def errors_pct(simulated: dict[str, float], runs: Sequence[RealRun]) -> dict[str, float]:
    return {
        name: (simulated[name] / statistics.mean(getattr(r.figures, name) for r in runs) - 1) * 100
        for name in LIMITS_PCT
    }


def fresh(costs: Costs) -> Costs:
    """Nothing that one run worked out is known to another."""
    return Costs({BASE: costs.profile(BASE)}, costs.cluster)


def run_for_real(
    policy: str,
    requests: list[JobRequest],
    costs: Costs,
    root: Path,
    workers: int,
    watch: NanoBatches,
) -> tuple[list[Turn], Span]:
    devices = ready_workers(root, workers)
    store: SqliteStore[Turn] = SqliteStore(
        root / "state.sqlite", decode=turn_of_json, about={"policy": policy}
    )
    clock = WallClock()
    executor = DeviceExecutor(devices, clock=clock, arrivals=requests, watch=watch)
    loop = Loop(
        state=State(costs.cluster),
        policy=make_policy(policy, fresh(costs), SETTINGS),
        executor=executor,
        store=store,
        clock=clock,
        tick_s=TICK_S,
    )
    began = time.monotonic()
    try:
        loop.run()
        span = Span(began, time.monotonic())
    finally:
        executor.close()
    turns = list(store.turns())
    store.close()
    return turns, span


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


if __name__ == "__main__":
    sys.exit(main())
