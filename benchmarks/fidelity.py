"""Does a simulated run end when a real one does? `python benchmarks/fidelity.py --json FILE`.

Jobs on the demo base arrive over time at two one-thread worker processes, which stand for two GPUs.
Every policy drives them for real, several times, through the control loop, and in simulations whose
costs are the profile of this machine. Makespan, mean and p99 of the completion times must agree,
and the policies must rank alike. Every real run's recorded turns are replayed.

The profile is measured here first, by `tlora profile`'s own code in as many processes at once as
there are workers (they share caches and memory). Then a calibration on other jobs than those of the
comparison, through the same workers, adds what a profile of bare nano-batches cannot know: what a
worker spends around them, and what attaching and ending cost with files. A round of it is run
before every real run and after the last, and a policy is simulated at each speed that the machine
had around its real runs. docs/fidelity.md says more. Run it on a machine that does nothing else.
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
from typing import Any

import numpy as np
from fidelity_calibration import (
    BASE,
    BATCHES,
    NEVER,
    RANKS,
    Calibration,
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
from fidelity_probe import Probe, Span
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
        probe = Probe()
        try:
            for _ in range(ROUNDS_BEFORE):
                calibration.run_round()
            told = calibration.overheads(measured)
            say(f"policies are told: {told.line}")
            spec, requests, costs = workload(told.on(measured), options)
            real, drifts = run_all(spec, requests, costs, calibration, options, work)
            overheads = calibration.overheads(measured)
        finally:
            probe.close()
            calibration.close()
    speeds = Speeds(calibration, probe)
    say(f"the simulation is told: {overheads.line}")
    simulator = Simulator(measured, overheads, requests, costs)
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
        "jobs": len(requests),
        "repeats": options.repeats,
        "heldout_error_pct": measured.heldout_error_pct,
        "noise_pct": measured.noise_pct,
        "overheads": overheads.as_json,
        "machine_slower_pct": drifts,
        "probe": speeds.as_json,
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
    parser.add_argument("--repeats", type=int, default=3)
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

    batches: list[RunBatch]
    round_before: int
    """Of the calibration; the next one came after it."""

    span: Span


def run_all(
    spec: RunSpec,
    requests: list[JobRequest],
    costs: Costs,
    calibration: Calibration,
    options: argparse.Namespace,
    work: Path,
) -> tuple[dict[str, list[RealRun]], list[float]]:
    """Every policy in turn, each time in another order, a round of the calibration before each and
    after the last; and how much slower than at first the machine was in each of these rounds."""
    policies = options.policies.split(",")
    found: dict[str, list[RealRun]] = {policy: [] for policy in policies}
    drifts: list[float] = []
    for repeat in range(options.repeats):
        first = repeat % len(policies)
        for policy in [*policies[first:], *policies[:first]]:
            drifts.append(calibration.run_round())
            root = run_directory(spec, work / f"{policy}-{repeat}")
            batches = NanoBatches()
            turns, span = run_for_real(policy, requests, costs, root, options.workers, batches)
            difference = replay(
                turns,
                state=State(costs.cluster),
                policy=make_policy(policy, fresh(costs), SETTINGS),
            )
            run = RealRun(
                figures(turns), difference is None, batches.kept, calibration.rounds - 1, span
            )
            found[policy].append(run)
            say(
                f"{policy}, repeat {repeat + 1}: makespan {run.figures.makespan_s:.1f} s, mean JCT "
                f"{run.figures.jct_mean_s:.1f} s (machine {drifts[-1]:+.1f} % before); replay "
                f"{difference or 'gives the same decisions'}"
            )
    drifts.append(calibration.run_round())
    return found, drifts


@dataclass(frozen=True, slots=True)
class Simulator:
    profile: Profile
    overheads: Overheads
    requests: list[JobRequest]
    told: Costs
    """What policies believe, here as in the real runs."""

    def truth(self, slower: float) -> Profile:
        profile = self.overheads.slower(slower).on(self.profile)
        return with_memory(profile, self.requests)

    def run(self, policy: str, slower: float = 0.0) -> Figures:
        """On a machine that is slower by so much than on average."""
        truth = ComposedCosts({BASE: self.truth(slower)}, self.told.cluster)
        clock = ManualClock()
        store: MemoryStore[Turn] = MemoryStore()
        loop = Loop(
            state=State(self.told.cluster),
            policy=make_policy(policy, fresh(self.told), SETTINGS),
            executor=SimulatedExecutor(clock=clock, costs=truth, arrivals=self.requests),
            store=store,
            clock=clock,
            tick_s=TICK_S,
        )
        loop.run()
        return figures(list(store.turns()))

    def price_error_pct(self, run: RealRun, slower: float) -> float:
        loads = {request.name: request.load for request in self.requests}
        return price_error_pct(run.batches, loads, self.truth(slower))


class Speeds:
    """How slow the machine was in each real run, against its mean over all rounds of the
    calibration: what a worker took in the rounds before and after it, times how much longer than in
    that round the probe's work took during the run. No outcome of a run is used for it."""

    def __init__(self, calibration: Calibration, probe: Probe) -> None:
        self._calibration, self._probe = calibration, probe

    def around(self, run: RealRun) -> list[float]:
        """As the rounds alone say."""
        numbers = (run.round_before, run.round_before + 1)
        return [slower for number in numbers for slower in self._calibration.slowness(number)]

    def during(self, run: RealRun) -> list[float]:
        seconds = self._probe.seconds(run.span)
        return [
            (1 + slower) * seconds / self._probe.seconds(self._calibration.spans[number]) - 1
            for number in (run.round_before, run.round_before + 1)
            for slower in self._calibration.slowness(number)
        ]

    @property
    def as_json(self) -> dict[str, Any]:
        """Milliseconds of each round, and how well they follow what the workers took there."""
        spans = self._calibration.spans
        taken = [self._probe.seconds(span) * 1e3 for span in spans]
        workers = [statistics.mean(self._calibration.slowness(i)) for i in range(len(spans))]
        return {"rounds_ms": taken, "correlation": float(np.corrcoef(taken, workers)[0, 1])}


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
