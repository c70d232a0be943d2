"""Does a simulated run end when a real one does? `python benchmarks/fidelity.py --json FILE`.

Jobs on the demo base arrive over time at two one-thread worker processes, which stand for two GPUs.
Every policy drives them for real, several times, through the control loop, and once in a simulation
whose costs are the profile of this machine. Makespan, mean and p99 of the completion times must
agree, and the policies must rank alike. Every real run's recorded turns are replayed.

The profile is measured here first, by `tlora profile`'s own code in as many processes at once as
there are workers (they share caches and memory). Then a calibration on other jobs than those of the
comparison, through the same workers, adds what a profile of bare nano-batches cannot know: what a
worker spends around them (a factor and a constant per nano-batch), and what attaching, leaving and
ending cost with files. docs/fidelity.md says more. Run it on a machine that does nothing else.
"""

import argparse
import json
import math
import multiprocessing
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

from tlora.config import dump_spec, load_spec
from tlora.control import Loop, Turn
from tlora.control.protocols import turn_of_json
from tlora.control.replay import replay
from tlora.core.assets import DEMO
from tlora.core.clock import ManualClock, WallClock
from tlora.core.cluster import uniform_cluster
from tlora.core.event import Arrival, Completion, EarlyExit, JobFailure
from tlora.core.job import RunSpec
from tlora.core.plan import Plan
from tlora.core.request import JobRequest
from tlora.core.state import State
from tlora.costs.fit import non_negative_least_squares
from tlora.costs.groups import Costs
from tlora.costs.profile import Profile, read_profile, write_profile
from tlora.model.loading import load_shape
from tlora.model.targets import find_targets
from tlora.runtime.benchmark import record
from tlora.runtime.checking import prepare_jobs
from tlora.runtime.environment import quieten_libraries
from tlora.runtime.executors.devices import DeviceExecutor
from tlora.runtime.executors.messages import (
    Attach,
    Attached,
    Detach,
    Detached,
    Ended,
    Lost,
    Message,
    Noted,
    Ready,
)
from tlora.runtime.executors.processes import WorkerProcesses
from tlora.runtime.executors.worker import WorkerSettings
from tlora.runtime.profiling.profiling import run_profile
from tlora.runtime.profiling.settings import Settings as ProfileSettings
from tlora.runtime.requests import requests_of
from tlora.schedule import Settings, make_policy
from tlora.simulation.executor import SimulatedExecutor
from tlora.store.memory import MemoryStore
from tlora.store.sqlite import SqliteStore

BASE = str(DEMO / "base")
DATASETS = ("count", "extract", "haiku", "pirate", "polite", "reverse", "sentiment", "sql")
COLUMNS = {"sql": {"prompt": "question", "completion": "query"}}
RANKS = (2, 4, 8, 16)
BATCHES = (1, 2, 4, 8)
POLICIES = ("tlora", "solo", "tlora-no-scheduler")
SETTINGS = Settings(max_replicas=1, min_stay_s=10.0)
TICK_S = 10.0
ROUNDS = 5
"""Of the calibration; medians count."""

MEMORY_JOBS = 6
"""So many jobs of the mean fit into the memory that a device is said to have: a CPU would hold all,
and a policy that fills memory would have nothing to do."""

LOAD = 4.0
"""Jobs arrive in the first part of a run, so that what a job takes grows as the machine's slowness
does. Were they to arrive over all of it (1.5), a machine that is 5 % slower would give completion
times that are 20 % longer, and repeats of one real run would differ by more than the limits."""

LIMITS_PCT = {"makespan_s": 5.0, "jct_mean_s": 5.0, "jct_p99_s": 10.0}
WARM_TOKENS = 1024
NEVER = 1_000_000
"""Steps of jobs that are stopped before."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """What workers add to a profile."""

    factor: float
    """On all times of the profile."""

    round_s: float
    """More for every nano-batch."""

    job_s: float
    """More for every job that steps after it."""

    attach_s: float
    detach_s: float
    end_s: float
    worst_pct: float
    """The largest error of a calibration group's rate with these."""

    @property
    def line(self) -> str:
        pauses = {"attach": self.attach_s, "detach": self.detach_s, "end": self.end_s}
        return (
            f"workers: x {self.factor:.3f} + {self.round_s * 1e3:.2f} ms a nano-batch + "
            f"{self.job_s * 1e3:.2f} ms a step (worst group {self.worst_pct:+.1f} %), "
            + ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in pauses.items())
        )

    def on(self, profile: Profile) -> Profile:
        times = profile.time
        scaled = {
            name: getattr(times, name) * self.factor
            for name in ("fixed_s", "segment_s", "flat_s", "row_s", "square_s", "lora_s", "rank_s")
        }
        scaled["fixed_s"] += self.round_s
        steps = profile.steps
        return replace(
            profile,
            time=replace(times, **scaled),
            steps=replace(
                steps,
                pass_s=steps.pass_s * self.factor,
                job_s=steps.job_s * self.factor + self.job_s,
                parameter_s=steps.parameter_s * self.factor,
            ),
            # A group's end is the end of its last job, whose adapter is written while its device
            # does nothing else; a start pays for it, for in a simulation an end is free.
            load_s=self.end_s,
            warmup_s=0.0,
            attach_s=self.attach_s,
            detach_s=self.end_s,
        )


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
        overheads = calibrate(measured, options.workers, options.calibration_seconds, work)
        profile = overheads.on(measured)
        say(overheads.line)
        spec, requests, costs = workload(profile, options)
        found = {}
        for policy in options.policies.split(","):
            found[policy] = compare(policy, spec, requests, costs, options, work)
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


def measure_profile(workers: int, seconds: float, work: Path) -> Profile:
    """Of the first of as many processes as there are workers, all measuring."""
    context = multiprocessing.get_context("spawn")
    say(f"profiling in {workers} processes")
    paths = [work / f"profile-{number}.json" for number in range(workers)]
    processes = [context.Process(target=profile_into, args=(str(p), seconds)) for p in paths]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return read_profile(paths[0])


def profile_into(path: str, seconds: float) -> None:
    settings = ProfileSettings(
        output=Path(path), shape="demo", seconds=seconds, threads=1, device="cpu"
    )
    command = shlex.join(["python", *sys.argv])
    write_profile(run_profile(settings, command, lambda text: None), Path(path))


def new_spec(jobs: Sequence[dict[str, Any]], *, warm: int = 0) -> RunSpec:
    """With as many jobs more as workers are to be warmed."""
    more = [new_job(f"warm-{i}", i, rank=8, batch=8, steps=10) for i in range(warm)]
    return load_spec({"base": {"model": BASE}, "engine": {"device": "cpu"}, "jobs": [*jobs, *more]})


def new_job(name: str, number: int, *, rank: int, batch: int, steps: int) -> dict[str, Any]:
    dataset = DATASETS[number % len(DATASETS)]
    data: dict[str, Any] = {"path": str(DEMO / "data" / f"{dataset}.jsonl")}
    if dataset in COLUMNS:
        data["columns"] = COLUMNS[dataset]
    return {
        "name": name,
        "data": data,
        "lora": {"r": rank, "lora_alpha": 16},
        "train": {
            "batch_size": batch,
            "max_steps": steps,
            "learning_rate": 1e-3,
            "max_length": 128,
            "logging_steps": 20,
            "seed": number,
        },
        "save": {"steps": None},
    }


def requests_for(spec: RunSpec) -> list[JobRequest]:
    targets = find_targets(load_shape(spec.base))
    return requests_of(spec, prepare_jobs(spec, limit=None), targets, base=BASE)


def run_directory(spec: RunSpec, root: Path) -> Path:
    root.mkdir(parents=True)
    (root / "resolved.yaml").write_text(dump_spec(spec))
    return root


def ready_workers(root: Path, count: int) -> WorkerProcesses:
    """Base loaded and warm, nothing attached: what a process does once in its life is no matter of
    scheduling."""
    workers = WorkerProcesses([WorkerSettings(root, "cpu")] * count)

    def wait_for(kind: type[Message]) -> None:
        waited = set(range(count))
        while waited:
            for device, message in workers.receive(60.0):
                assert not isinstance(message, Lost), message
                if isinstance(message, kind):
                    waited.discard(device)

    wait_for(Ready)
    for device in range(count):
        workers.send(device, Attach(f"warm-{device}", 1.0, WARM_TOKENS))
    wait_for(Ended)
    return workers


def calibrate(profile: Profile, workers: int, seconds: float, work: Path) -> Overheads:
    """Groups of one to ten jobs, the same on all workers at once."""
    groups = [[0], [3], [6], [1, 4], [2, 5, 7, 8], [0, 3, 6, 9, 10, 11], list(range(2, 12))]
    jobs = [
        new_job(
            f"c{device}-{number}",
            number + 3,
            rank=RANKS[number % 4],
            batch=BATCHES[(number // 2) % 4],
            steps=NEVER,
        )
        for device in range(workers)
        for number in range(12)
    ]
    ends = [
        new_job(f"e{device}-{number}", number, rank=8, batch=2, steps=4)
        for device in range(workers)
        for number in range(4)
    ]
    spec = new_spec([*jobs, *ends], warm=workers)
    requests = {request.name: request for request in requests_for(spec)}
    costs = Costs({BASE: profile}, uniform_cluster(workers))
    bucket = profile.budget_tokens
    devices = ready_workers(run_directory(spec, work / "calibration"), workers)
    generator = np.random.Generator(np.random.PCG64(1))
    seen: dict[tuple[int, int], list[float]] = {}
    attaches: list[float] = []
    detaches: list[float] = []
    try:
        # Every round in an order of its own, so that a machine that gets slower does so for all.
        for place in [each for _ in range(ROUNDS) for each in generator.permutation(len(groups))]:
            group = groups[place]
            names = [[f"c{device}-{number}" for number in group] for device in range(workers)]
            heard = conversation(devices, names, bucket, seconds)
            attaches += [each.seconds for _, _, each in heard if isinstance(each, Attached)]
            detaches += [each.seconds for _, _, each in heard if isinstance(each, Detached)]
            for device in range(workers):
                found = round_seconds(heard, device, names[device])
                seen.setdefault((int(place), device), []).append(found)
        ended = endings(devices, workers, bucket)
    finally:
        devices.close()
    rows: list[tuple[float, float, float]] = []
    for place, device in seen:
        together = [requests[f"c{device}-{number}"] for number in groups[place]]
        weights = [1.0] * len(together)
        found = costs.predict(together, weights, Plan(bucket=bucket), costs.cluster.tier([device]))
        rows.append((found.round_s, 1.0, sum(found.steps_per_s) * found.round_s))
    measured = np.array([statistics.median(each) for each in seen.values()])
    features = np.array(rows)
    # Relative errors, so that small groups count as much as large ones.
    fitted = non_negative_least_squares(features / measured[:, None], np.ones(len(measured)))
    errors = (features @ fitted / measured - 1) * 100
    for (place, _), error in zip(seen, errors, strict=True):
        say(f"  a group of {len(groups[place])}: predicted with the overheads {error:+.1f} %")
    return Overheads(
        factor=float(fitted[0]),
        round_s=float(fitted[1]),
        job_s=float(fitted[2]),
        attach_s=statistics.median(attaches),
        detach_s=statistics.median(detaches),
        end_s=statistics.median(ended),
        worst_pct=float(max(errors, key=abs)),
    )


Heard = list[tuple[float, int, Message]]


def conversation(
    devices: WorkerProcesses, names: list[list[str]], bucket: int, seconds: float
) -> Heard:
    """Attach, train for so long, detach; all that was said, and when it was heard."""
    heard: Heard = []

    def listen(count: int, kind: type[Message], until: float = math.inf) -> None:
        while count and time.monotonic() < until:
            for device, message in devices.receive(0.2):
                heard.append((time.monotonic(), device, message))
                count -= isinstance(message, kind)

    total = sum(len(each) for each in names)
    for device, each in enumerate(names):
        for name in each:
            devices.send(device, Attach(name, 1.0, bucket))
    listen(total, Attached)
    listen(-1, Ready, time.monotonic() + seconds)
    for device, each in enumerate(names):
        for name in each:
            devices.send(device, Detach(name))
    listen(total, Detached)
    return heard


def round_seconds(heard: Heard, device: int, names: Sequence[str]) -> float:
    """Of a nano-batch with everything around it, while all jobs of the group were there."""
    mine = [message for _, where, message in heard if where == device]
    batches = [each for each in mine if isinstance(each, Noted) and each.what == "nano_batch"]
    whole = [each for each in batches if set(each.fields["tokens"]) == set(names)]
    # The first ones warm up.
    first, last = whole[len(whole) // 10], whole[-1]
    between = [each for each in batches if first.time < each.time <= last.time]
    return (last.time - first.time) / len(between)


def endings(devices: WorkerProcesses, workers: int, bucket: int) -> list[float]:
    """Seconds between a job's last nano-batch and what is said of its end."""
    found: list[float] = []
    for number in range(4):
        for device in range(workers):
            devices.send(device, Attach(f"e{device}-{number}", 1.0, bucket))
        last: dict[int, float] = {}
        over = 0
        while over < workers:
            for device, message in devices.receive(0.2):
                if isinstance(message, Noted) and message.what == "nano_batch":
                    last[device] = message.time
                elif isinstance(message, Noted) and message.what == "ended":
                    found.append(message.time - last[device])
                over += isinstance(message, Ended)
    return found


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


def compare(
    policy: str,
    spec: RunSpec,
    requests: list[JobRequest],
    costs: Costs,
    options: argparse.Namespace,
    work: Path,
) -> dict[str, Any]:
    simulated = figures(simulate(policy, requests, costs))
    say(f"{policy}: simulated makespan {simulated.makespan_s:.1f} s")
    real: list[Figures] = []
    replayed = 0
    for repeat in range(options.repeats):
        root = run_directory(spec, work / f"{policy}-{repeat}")
        turns = run_for_real(policy, requests, costs, root, options.workers)
        real.append(figures(turns))
        difference = replay(
            turns,
            state=State(costs.cluster),
            policy=make_policy(policy, fresh(costs), SETTINGS),
        )
        replayed += difference is None
        say(
            f"{policy}, repeat {repeat + 1}: makespan {real[-1].makespan_s:.1f} s, mean JCT "
            f"{real[-1].jct_mean_s:.1f} s; replay {difference or 'gives the same decisions'}"
        )
    errors = {}
    for name in LIMITS_PCT:
        mean = statistics.mean(getattr(each, name) for each in real)
        errors[name] = (getattr(simulated, name) / mean - 1) * 100
    return {
        "simulated": as_dict(simulated),
        "real": [as_dict(each) for each in real],
        "error_pct": errors,
        "replayed": replayed,
    }


def fresh(costs: Costs) -> Costs:
    """Nothing that one run worked out is known to another."""
    return Costs({BASE: costs.profile(BASE)}, costs.cluster)


def simulate(policy: str, requests: list[JobRequest], costs: Costs) -> list[Turn]:
    clock = ManualClock()
    store: MemoryStore[Turn] = MemoryStore()
    loop = Loop(
        state=State(costs.cluster),
        policy=make_policy(policy, fresh(costs), SETTINGS),
        executor=SimulatedExecutor(clock=clock, costs=fresh(costs), arrivals=requests),
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
    same = all(real == simulated for real, simulated in ranks.values())
    replays = all(each["replayed"] == len(each["real"]) for each in found.values())
    return {
        "ranking": {name: list(real) for name, (real, _) in ranks.items()},
        "same_ranking": same,
        "within_limits": within,
        "replays_agree": replays,
        "holds": within and same and replays,
    }


def ranking(found: dict[str, dict[str, Any]], name: str, *, real: bool = False) -> tuple[str, ...]:
    def value(policy: str) -> float:
        each = found[policy]
        if real:
            return statistics.mean(run[name] for run in each["real"])
        return each["simulated"][name]

    return tuple(sorted(found, key=value))


def print_table(found: dict[str, dict[str, Any]], verdict: dict[str, Any]) -> None:
    print(f"\n{'policy':20}{'':12}{'real':>10}{'spread':>9}{'simulated':>12}{'error':>9}")
    for policy, each in found.items():
        for name, limit in LIMITS_PCT.items():
            runs = [run[name] for run in each["real"]]
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


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
