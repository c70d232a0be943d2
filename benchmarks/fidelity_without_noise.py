"""Is the simulator right where the machine does not vary by itself?
`python benchmarks/fidelity_without_noise.py --json FILE`.

The jobs, policies and control loop of fidelity.py, on devices that are computed one nano-batch
after another: composed by the engine's composer from sequences in an order of their own, each with
a price of the cost model and some noise. Against these stand simulations whose groups have constant
rates between changes: composed (as fidelity.py simulates) and dealt like a liquid. What differs
here is the simulator's, not the machine's. A minute or two.
"""

import argparse
import json
import math
import random
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fidelity import SETTINGS, TICK_S, Figures, arguments, figures, fresh, with_memory, workload
from fidelity_calibration import BASE
from fidelity_overheads import Overheads
from fidelity_verdict import LIMITS_PCT

from tlora.control import Loop, Turn
from tlora.control.protocols import Executor
from tlora.core.clock import ManualClock
from tlora.core.decision import Decision, Join, Move, Pause, Resize, Start
from tlora.core.event import Arrival, Completion, Event
from tlora.core.request import JobRequest
from tlora.core.state import State
from tlora.costs import shipped_profiles
from tlora.costs.groups import Costs
from tlora.runtime.benchmark import record
from tlora.schedule import make_policy
from tlora.simulation.composed import ComposedCosts, Feed, next_nano_batch, sizes_of
from tlora.simulation.executor import SimulatedExecutor
from tlora.store.memory import MemoryStore

SLOWER = 0.08
"""Runs are spread evenly over machines that are so much faster to so much slower than the mean."""

NOISE = 0.05
"""Of each nano-batch's seconds: the deviation of their logarithm."""

ATTACH_S, END_S = 0.005, 0.024


@dataclass(slots=True)
class Device:
    bucket: int = 0
    feeds: dict[str, Feed] = field(default_factory=dict[str, Feed])
    free_from: float = 0.0
    """No nano-batch begins before."""

    ends_at: float = math.inf
    """Of the nano-batch under way."""

    @property
    def acts_at(self) -> float:
        if self.ends_at < math.inf:
            return self.ends_at
        return self.free_from if self.feeds else math.inf


class NanoBatchExecutor:
    """Every nano-batch is an event. Plans are of one GPU."""

    def __init__(
        self, *, clock: ManualClock, costs: Costs, arrivals: Iterable[JobRequest], seed: int
    ) -> None:
        self.clock, self.costs, self.seed = clock, costs, seed
        self._coming = sorted(arrivals, key=lambda request: request.arrival_s)
        self._noise = random.Random(seed)
        self._devices = [Device() for _ in range(len(costs.cluster))]
        self._groups: dict[str, Device] = {}
        self._group_of: dict[str, str] = {}
        self._requests: dict[str, JobRequest] = {}
        self._feeds: dict[str, Feed] = {}

    @property
    def idle(self) -> bool:
        return not self._coming and not self._group_of

    def wait(self, until: float) -> Sequence[Event]:
        while True:
            device = min(self._devices, key=lambda each: each.acts_at)
            coming = self._coming[0].arrival_s if self._coming else math.inf
            at = min(device.acts_at, coming)
            if at > until:
                self.clock.move_to(until)
                return ()
            self.clock.move_to(max(at, self.clock.now()))
            if coming <= device.acts_at:
                return [self._arrive()]
            if device.ends_at < math.inf:
                device.free_from, device.ends_at = device.ends_at, math.inf
                if events := self._ends(device):
                    return events
            else:
                self._begin(device)

    def progress(self) -> dict[str, float]:
        return {job: self._feeds[job].steps for job in self._group_of}

    def apply(self, decision: Decision) -> None:
        match decision:
            case Start():
                device = self._devices[decision.gpus[0]]
                self._groups[decision.group] = device
                device.bucket = decision.plan.bucket
                self._stall(device, END_S)
                for job, weight in zip(decision.jobs, decision.weights, strict=True):
                    self._attach(job, decision.group, weight)
            case Join(job=job, group=group, weight=weight):
                self._attach(job, group, weight)
            case Move(job=job, target=target, weight=weight):
                self._detach(job)
                self._attach(job, target, weight)
            case Pause(job=job):
                self._detach(job)
            case Resize(group=group, plan=plan, weights=weights):
                self._groups[group].bucket = plan.bucket
                jobs = [job for job, name in self._group_of.items() if name == group]
                for job, weight in zip(jobs, weights, strict=True):
                    self._feeds[job].weight = weight
            case _:
                raise AssertionError(decision)

    def close(self) -> None:
        pass

    def _arrive(self) -> Arrival:
        request = self._coming.pop(0)
        self._requests[request.name] = request
        return Arrival(self.clock.now(), request)

    def _begin(self, device: Device) -> None:
        base = self.costs.base(BASE)
        sizes = sizes_of(base, device.bucket)
        found = next_nano_batch(base, list(device.feeds.values()), device.bucket, sizes)
        noise = math.exp(self._noise.gauss(0.0, NOISE))
        device.ends_at = max(device.free_from, self.clock.now()) + found.seconds * noise

    def _ends(self, device: Device) -> list[Event]:
        """Of the jobs whose last step this was."""
        through = [
            job
            for job, feed in device.feeds.items()
            if feed.steps >= self._requests[job].total_steps
        ]
        for job in through:
            self._detach(job)
        return [Completion(self.clock.now(), job) for job in through]

    def _attach(self, job: str, group: str, weight: float) -> None:
        request = self._requests[job]
        if job not in self._feeds:
            figures = self.costs.figures(request)
            self._feeds[job] = Feed(request, figures, weight, seed=1 + self.seed)
        feed, device = self._feeds[job], self._groups[group]
        feed.weight, feed.credit = weight, 0.0
        device.feeds[job] = feed
        self._group_of[job] = group
        self._stall(device, ATTACH_S)

    def _detach(self, job: str) -> None:
        device = self._groups[self._group_of.pop(job)]
        del device.feeds[job]
        self._stall(device, END_S)

    def _stall(self, device: Device, seconds: float) -> None:
        if device.ends_at < math.inf:
            # It is obeyed between nano-batches.
            device.ends_at += seconds
        else:
            device.free_from = max(device.free_from, self.clock.now()) + seconds


@dataclass(frozen=True, slots=True)
class World:
    """A kind of devices."""

    name: str
    costs: type[Costs]
    by_nano_batches: bool = False

    def executor(
        self, clock: ManualClock, costs: Costs, requests: Sequence[JobRequest], seed: int
    ) -> Executor:
        if self.by_nano_batches:
            return NanoBatchExecutor(clock=clock, costs=costs, arrivals=requests, seed=seed)
        return SimulatedExecutor(clock=clock, costs=costs, arrivals=requests)


COMPUTED = World("nano-batches", Costs, by_nano_batches=True)
SIMULATED = (World("composed", ComposedCosts), World("dealt", Costs))


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    profile = shipped_profiles()["cpu-1-thread-demo"]
    mean = Overheads(
        factor=1.0,
        round_s=profile.time.fixed_s,
        segment_s=profile.time.segment_s,
        attach_s=ATTACH_S,
        end_s=END_S,
    )
    _, requests, told = workload(mean.on(profile), fidelity_options(options))

    def run(policy: str, world: World, seed: int) -> Figures:
        part = seed / (options.runs - 1) if options.runs > 1 else 0.5
        slower = SLOWER * (2 * part - 1)
        truth = with_memory(mean.slower(slower).on(profile), requests)
        clock = ManualClock()
        store: MemoryStore[Turn] = MemoryStore()
        Loop(
            state=State(told.cluster),
            policy=make_policy(policy, fresh(told), SETTINGS),
            executor=world.executor(
                clock, world.costs({BASE: truth}, told.cluster), requests, seed
            ),
            store=store,
            clock=clock,
            tick_s=TICK_S,
        ).run()
        return figures(list(store.turns()))

    found: dict[str, Any] = {}
    print(f"{'policy':16}{'':12}{'computed':>10}" + "".join(f"{w.name:>12}" for w in SIMULATED))
    for policy in options.policies.split(","):
        all_runs = {
            world.name: [run(policy, world, seed) for seed in range(options.runs)]
            for world in (COMPUTED, *SIMULATED)
        }
        found[policy] = compared(all_runs)
        for name in LIMITS_PCT:
            errors = "".join(f"{found[policy][world.name][name]:+10.1f} %" for world in SIMULATED)
            print(f"{policy:16}{name:12}{found[policy][COMPUTED.name][name]:8.1f} s{errors}")
    line = {
        "v": 1,
        "kind": "fidelity_without_noise",
        "commit": record.commit(),
        "command": shlex.join(["python", *sys.argv]),
        "jobs": len(requests),
        "runs": options.runs,
        "policies": found,
    }
    if options.json is not None:
        with open(options.json, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return 0


def compared(runs: dict[str, list[Figures]]) -> dict[str, dict[str, float]]:
    """Seconds on computed devices; errors of the others in percent. Means over all runs."""

    def mean(world: str, name: str) -> float:
        return statistics.mean(getattr(each, name) for each in runs[world])

    found = {COMPUTED.name: {name: mean(COMPUTED.name, name) for name in LIMITS_PCT}}
    for world in SIMULATED:
        found[world.name] = {
            name: (mean(world.name, name) / found[COMPUTED.name][name] - 1) * 100
            for name in LIMITS_PCT
        }
    return found


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Simulated runs against computed ones.")
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=8.0, help="of the mean job, alone")
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--policies", default="tlora,solo,fifo-memory")
    parser.add_argument("--json")
    return parser.parse_args(argv)


def fidelity_options(options: argparse.Namespace) -> argparse.Namespace:
    given = ["--jobs", str(options.jobs), "--seconds", str(options.seconds)]
    return arguments(given)


if __name__ == "__main__":
    sys.exit(main())
