"""`tlora train --devices N`: the jobs of a file over several devices, by the control loop.

A worker process for each device trains; this process decides who trains where, remembers that in
DIR/state.sqlite, and shows how it goes. What is left on disk is what a run on one device leaves.
"""

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tlora.config import dump_spec
from tlora.control import Loop, Turn
from tlora.control.protocols import turn_of_json
from tlora.core.clock import WallClock
from tlora.core.cluster import uniform_cluster
from tlora.core.errors import SpecError
from tlora.core.job import JobSpec, RunSpec
from tlora.core.request import JobRequest
from tlora.core.state import State
from tlora.costs.profile import as_json as profile_as_json
from tlora.data.prepare import PreparedData
from tlora.model.loading import load_shape, resolve_device
from tlora.model.targets import find_targets
from tlora.runtime.budget import nano_batch_tokens
from tlora.runtime.checking import check_targets, context_length, prepare_jobs
from tlora.runtime.data_lines import full_lines, start_lines
from tlora.runtime.directory import JobResult, RunDirectory, replace_text
from tlora.runtime.environment import quieten_libraries
from tlora.runtime.executors.devices import DeviceExecutor
from tlora.runtime.executors.messages import (
    Attached,
    Ended,
    Evaluated,
    Message,
    Noted,
    Ready,
    Said,
    Stepped,
)
from tlora.runtime.executors.notes import event_of, outcome_of
from tlora.runtime.executors.processes import WorkerProcesses, end_if_imported
from tlora.runtime.executors.rates import RateWatch
from tlora.runtime.executors.worker import WorkerSettings, no_result
from tlora.runtime.interrupts import interruptible
from tlora.runtime.live import choose_progress
from tlora.runtime.planning import ChosenProfile, check_policy, choose_profile, new_costs
from tlora.runtime.progress import MANY_JOBS, Progress
from tlora.runtime.requests import request_of
from tlora.runtime.resuming import check_same_bits, check_unchanged, finished, saved_steps
from tlora.runtime.sinks import check_trackers
from tlora.runtime.training import (
    RunResult,
    describe_run,
    leave_report,
    load_super_model,
    show_exact,
)
from tlora.schedule import Settings, make_policy
from tlora.schedule.fairness import fair_gpus
from tlora.store.sqlite import SqliteStore
from tlora.training.driver import JobDriver, Status
from tlora.training.exactness import Exactness
from tlora.training.outcome import EvaluationDone, StepDone

SETTINGS = Settings(max_replicas=1)
"""Of policies: every group has one device. One over several is a run of its own
(runtime/group)."""


def train_on_devices(
    spec: RunSpec,
    *,
    output: Path | str,
    devices: int,
    fresh: bool = False,
    profile: str | None = None,
    policy: str = "tlora",
    progress: Progress | None = None,
) -> RunResult:
    """As `training.train`, over so many devices: GPUs where there are, one-thread processes
    otherwise."""
    end_if_imported()
    quieten_libraries()
    check_trackers(spec.report_to)
    check_policy(policy)
    progress = progress or choose_progress()
    names = device_names(resolve_device(spec.engine.device), devices)
    device = torch.device(names[0])
    directory = RunDirectory(Path(output))
    absent: tuple[JobSpec, ...] = ()
    if directory.is_run and not fresh:
        absent = check_unchanged(directory, spec)
    shape = load_shape(spec.base)
    targets = find_targets(shape)
    check_targets(spec, targets)
    data = prepare_jobs(spec, limit=context_length(shape.config))
    budget = nano_batch_tokens(spec, device, data, shape.num_parameters())
    progress.say(*start_lines(spec.jobs, data, directory.root / "data.txt"))
    chosen = choose_profile(spec, profile, device)
    progress.say(f"{devices} devices, policy {policy}; profile: {chosen.source}")
    proof = proven(spec, device, data, budget, directory if not fresh else None)
    try:
        directory.create(fresh=fresh)
        recorded = replace(spec, jobs=(*spec.jobs, *absent))
        replace_text(directory.root / "resolved.yaml", dump_spec(recorded))
        replace_text(directory.root / "data.txt", "\n".join(full_lines(data)) + "\n")
        about = describe_run(spec, device, proof) | {"devices": devices, "policy": policy}
        directory.write_json(directory.root / "run.json", about)
        lead = Lead(spec, data, directory, progress)
        lead.begin(budget)
        requests = [
            request_of(job, data[job.name], targets, base=spec.base.model)
            for job in lead.unfinished
        ]
        exact = budget if spec.engine.isolation == "exact" else None
        stopped = bool(requests) and _drive(lead, requests, names, chosen, policy, exact)
    finally:
        progress.close()
        directory.close()
    leave_report(directory.root, progress)
    progress.finish(list(lead.results.values()), directory.root)
    return RunResult(directory.root, lead.results, interrupted=stopped)


def _drive(
    lead: "Lead",
    requests: list[JobRequest],
    names: list[str],
    chosen: ChosenProfile,
    policy: str,
    exact: int | None,
) -> bool:
    """The loop, until every job is over; True if a person stopped it before."""
    directory, number = lead.directory, lead.nano_batch_tokens
    limit = None if isinstance(number, str) else number
    cluster = uniform_cluster(len(names), per_node=len(names))
    state = State(cluster)
    # Whoever decides, workers run the fused kernels.
    costs = new_costs(chosen.profile, requests, cluster)
    store: SqliteStore[Turn] = SqliteStore(
        directory.root / "state.sqlite",
        decode=turn_of_json,
        about={
            "policy": policy,
            "devices": len(names),
            "settings": asdict(SETTINGS),
            "profile": profile_as_json(chosen.profile),
            "started": time.time(),
        },
    )
    with interruptible(on_first=lead.progress.on_interrupt) as interrupt:
        executor = DeviceExecutor(
            WorkerProcesses(
                [WorkerSettings(directory.root.resolve(), name, limit, exact) for name in names],
                threads=None if names[0].startswith("cuda") else 1,
            ),
            clock=lead.clock,
            arrivals=requests,
            saved_steps=lambda job: saved_steps(directory, job),
            watch=lead.hear,
            should_stop=interrupt,
            rates=RateWatch(costs, fair_gpus=lambda: fair_gpus(state)),
        )
        loop = Loop(
            state=state,
            policy=make_policy(policy, costs, SETTINGS),
            executor=executor,
            store=store,
            clock=lead.clock,
        )
        try:
            while (state.jobs or not executor.idle) and not interrupt():
                loop.step()
        finally:
            executor.close()
    lead.end(store)
    store.close()
    return interrupt.asked and any(request.name not in lead.results for request in requests)


def device_names(device: torch.device, count: int) -> list[str]:
    """One for each worker."""
    if device.type != "cuda":
        return [str(device)] * count
    there = torch.cuda.device_count()
    if count > there:
        raise SpecError(f"{count} were asked for, and this machine has {there}", field="--devices")
    return [f"cuda:{number}" for number in range(count)]


def proven(
    spec: RunSpec,
    device: torch.device,
    data: dict[str, PreparedData],
    budget: int,
    directory: RunDirectory | None,
) -> Exactness | None:
    """Every worker proves it for itself; here it is only for the record. Raises SpecError if the
    run in `directory` was another kind of machine's."""
    if spec.engine.isolation != "exact":
        return None
    proof = show_exact(load_super_model(spec, device), spec, data, budget)
    if device.type == "cuda":
        # Its worker is on the same device, and needs the room.
        gc.collect()
        torch.cuda.empty_cache()
    if directory is not None and directory.is_run:
        check_same_bits(directory.root, describe_run(spec, device, proof))
    return proof


class Lead:
    """What the leading process makes of its workers' messages: events.jsonl, the view, results."""

    def __init__(
        self,
        spec: RunSpec,
        data: dict[str, PreparedData],
        directory: RunDirectory,
        progress: Progress,
        *,
        over: Callable[[RunDirectory, JobSpec], JobResult | None] = finished,
    ) -> None:
        """`over` tells what came of a job, if it is not to be trained any more."""
        self.directory = directory
        self.progress = progress
        self.clock = WallClock()
        kept = {job.name: over(directory, job) for job in spec.jobs}
        self.results: dict[str, JobResult] = {
            name: result for name, result in kept.items() if result is not None
        }
        self.nano_batch_tokens = spec.engine.nano_batch_tokens
        self.unfinished = tuple(job for job in spec.jobs if job.name not in self.results)
        self._drivers = {
            job.name: JobDriver(job, data[job.name].train, data[job.name].evaluation)
            for job in self.unfinished
        }
        """Mirrors of those in the workers, for the view."""

        self._budget = 0
        self._shown = False

    def begin(self, budget: int) -> None:
        lines = [
            f"{each.job}: {each.status} before, after {each.steps} steps"
            for each in self.results.values()
        ]
        many = len(lines) >= MANY_JOBS
        self.progress.say(*([f"{len(lines)} jobs were over before"] if many else lines))
        for name, driver in self._drivers.items():
            driver.step = saved_steps(self.directory, name)
            if driver.step:
                self.progress.say(f"{name}: goes on after step {driver.step}")
        self._budget = budget
        if not self._drivers:
            self.directory.event("began")
            self.progress.start([], budget)

    def hear(self, device: int, message: Message) -> None:
        match message:
            case Ready():
                if not self._shown:
                    # From here on: before, workers load the base.
                    self.directory.event("began")
                    self.progress.start(list(self._drivers.values()), self._budget)
                    self._shown = True
            case Attached(job=job, step=step):
                self._drivers[job].step = step
            case Stepped():
                self._stepped(StepDone(**asdict(message)))
            case Evaluated():
                self._evaluated(EvaluationDone(**asdict(message)))
            case Ended(job=job, result=result):
                self._ended(JobResult(**result))
            case Noted(what=what, time=when, fields=fields):
                self._noted(device, what, when, fields)
            case Said(lines=lines):
                self.progress.say(*lines)
            case _:
                pass

    def end(self, store: SqliteStore[Turn]) -> None:
        """Jobs that no worker could say the end of: refused, or lost with their devices."""
        for row in store.jobs():
            over = row.status in ("failed", "refused")
            if over and row.name in self._drivers and row.name not in self.results:
                self._ended(no_result(row.name, row.reason or row.status))

    def _stepped(self, done: StepDone) -> None:
        driver = self._drivers[done.job]
        driver.step, driver.loss = done.step, done.loss
        driver.tokens_seen += done.tokens
        driver.sequences_seen += done.sequences
        self.progress.on_step(driver, done)

    def _evaluated(self, done: EvaluationDone) -> None:
        driver = self._drivers[done.job]
        driver.eval_loss = done.loss
        if done.step == 0:
            driver.first_eval_loss = done.loss
        self.progress.on_evaluation(driver, done)

    def _ended(self, result: JobResult) -> None:
        # A worker counts from when it began, which may be late.
        result = replace(result, seconds=round(self.clock.now(), 3))
        self.results[result.job] = result
        driver = self._drivers[result.job]
        driver.status, driver.reason = Status(result.status), result.reason
        with suppress(OSError):
            self.directory.write_result(result)
        self.progress.on_end(result)

    def _noted(self, device: int, what: str, when: float, fields: dict[str, Any]) -> None:
        if what == "nano_batch":
            self.progress.on_nano_batch(outcome_of(fields))
        record = event_of(device, what, when, fields)
        # As with all events, no job depends on it.
        with suppress(OSError):
            self.directory.append(self.directory.root / "events.jsonl", record)
