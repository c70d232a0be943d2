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

from tlora.control import Loop, Turn
from tlora.control.protocols import turn_of_json
from tlora.core.clock import WallClock
from tlora.core.cluster import uniform_cluster
from tlora.core.errors import SpecError, TloraError
from tlora.core.job import JobSpec, RunSpec
from tlora.core.state import State
from tlora.costs.groups import Costs
from tlora.costs.profile import as_json as profile_as_json
from tlora.data.prepare import PreparedData
from tlora.model.loading import context_length, load_shape, resolve_device
from tlora.model.targets import Target, find_targets
from tlora.runtime.budget import nano_batch_tokens
from tlora.runtime.checking import check_targets, prepare_jobs
from tlora.runtime.data_lines import start_lines
from tlora.runtime.devices import device_names
from tlora.runtime.directory import JobResult, RunDirectory
from tlora.runtime.elastic.desk import CANCELLED, Desk
from tlora.runtime.elastic.places import check_unlimited
from tlora.runtime.elastic.roll import Again
from tlora.runtime.environment import quieten_libraries
from tlora.runtime.executors.devices import DeviceExecutor
from tlora.runtime.executors.messages import (
    Attached,
    Ended,
    Evaluated,
    Lost,
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
from tlora.runtime.exporting import export_matrices
from tlora.runtime.interrupts import interruptible
from tlora.runtime.live import choose_progress
from tlora.runtime.opening import Opening, open_run
from tlora.runtime.planning import ChosenProfile, check_policy, choose_profile
from tlora.runtime.progress import MANY_JOBS, Progress, over_before
from tlora.runtime.requests import request_of
from tlora.runtime.resuming import check_same_bits, finished, saved_steps
from tlora.runtime.sinks import check_trackers
from tlora.runtime.threads import using_threads
from tlora.runtime.training import (
    RunResult,
    compiling_lines,
    describe_run,
    leave_report,
    load_super_model,
    show_exact,
)
from tlora.schedule import Settings, make_policy
from tlora.schedule.fairness import fair_gpus
from tlora.store.late import LateStore
from tlora.store.sqlite import SqliteStore
from tlora.training.checkpoint import find_newest
from tlora.training.driver import JobDriver, Status
from tlora.training.exactness import Exactness
from tlora.training.outcome import EvaluationDone, StepDone

KEPT_FIGURES = ("loss", "first_eval_loss", "eval_loss", "tokens_seen", "sequences_seen")
"""Of a checkpoint, for the result of a job that ends there."""

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
    again: Again | None = None,
) -> RunResult:
    """As `training.train`, over so many devices: GPUs where there are, one-thread processes
    otherwise."""
    end_if_imported()
    quieten_libraries()
    check_trackers(spec.report_to)
    check_policy(policy)
    check_unlimited(spec.engine, "over several, the scheduler says who trains together")
    progress = progress or choose_progress()
    names = device_names(resolve_device(spec.engine.device), devices)
    if again is None:
        again = Again(options=over_devices(devices, policy=policy, profile=profile))
    opening = open_run(spec, RunDirectory(Path(output)), fresh=fresh, again=again)
    try:
        return _train(opening, names, policy, profile, progress)
    finally:
        opening.directory.close()


def over_devices(
    devices: int, *, policy: str = "tlora", profile: str | None = None
) -> tuple[str, ...]:
    """As they are typed."""
    words = ["--devices", str(devices)]
    words += ["--policy", policy] if policy != "tlora" else []
    return (*words, *(["--profile", profile] if profile is not None else []))


def _train(
    opening: Opening, names: list[str], policy: str, profile: str | None, progress: Progress
) -> RunResult:
    spec, directory, device = opening.spec, opening.directory, torch.device(names[0])
    shape = load_shape(spec.base)
    targets = find_targets(shape)
    check_targets(spec, targets)
    data = prepare_jobs(spec, limit=context_length(shape.config))
    budget = nano_batch_tokens(spec, device, data, shape.num_parameters())
    progress.say(*start_lines(spec.jobs, data, directory.root / "data.txt"))
    progress.say(*compiling_lines(spec.engine, device))
    chosen = choose_profile(spec, profile, device)
    progress.say(f"{len(names)} devices, policy {policy}; profile: {chosen.source}")
    proof = proven(spec, device, data, budget, directory if opening.goes_on else None)
    desk: Desk | None = None
    try:
        opening.create()
        about = describe_run(spec, device, proof)
        opening.write(data, about | {"devices": len(names), "policy": policy})
        lead = Lead(spec, data, directory, progress)
        lead.begin(budget)
        desk = opening.desk(lead.unfinished, shape, device, progress)
        lead.on_result = desk.ended
        exact = budget if spec.engine.isolation == "exact" else None
        stopped = False
        if lead.unfinished or desk.is_asked(now=True):
            stopped = _drive(lead, desk, targets, names, chosen, policy, exact)
    finally:
        if desk is not None:
            desk.close()
        progress.close()
        directory.close_files()
    leave_report(directory.root, progress)
    progress.finish(list(lead.results.values()), directory.root)
    return RunResult(directory.root, lead.results, interrupted=stopped)


def _drive(
    lead: "Lead",
    desk: Desk,
    targets: dict[str, Target],
    names: list[str],
    chosen: ChosenProfile,
    policy: str,
    exact: int | None,
) -> bool:
    """The loop, until every job is over; True if a person stopped it before."""
    directory, number = lead.directory, lead.nano_batch_tokens
    base = lead.spec.base
    requests = [
        request_of(job, lead.data[job.name], targets, base=base.model)
        for job in lead.unfinished.values()
    ]
    limit = None if isinstance(number, str) else number
    cluster = uniform_cluster(len(names), per_node=len(names))
    state = State(cluster)
    # Whoever decides, workers run the fused kernels.
    costs = Costs({base.model: chosen.profile}, cluster)
    turns: SqliteStore[Turn] = SqliteStore(
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
    store = LateStore(
        turns, lambda why: lead.progress.say(f"state.sqlite cannot be written for now: {why}")
    )
    floor: _OverDevices | None = None

    def visit() -> None:
        if floor is not None:
            desk.serve(floor)
            floor.look_after()

    with interruptible(on_first=lead.progress.on_interrupt) as interrupt:
        executor = DeviceExecutor(
            WorkerProcesses(
                [WorkerSettings(directory.root.resolve(), name, limit, exact) for name in names],
                threads=None if names[0].startswith("cuda") else 1,
                lock=directory.lock,
            ),
            clock=lead.clock,
            arrivals=requests,
            saved_steps=lambda job: saved_steps(directory, job),
            watch=lead.hear,
            should_stop=interrupt,
            visit=visit,
            rates=RateWatch(costs, fair_gpus=lambda: fair_gpus(state)),
            on_failure=lead.failed,
        )
        loop = Loop(
            state=state,
            policy=make_policy(policy, costs, SETTINGS),
            executor=executor,
            store=store,
            clock=lead.clock,
        )
        floor = _OverDevices(lead, executor, targets)
        try:
            while not interrupt():
                if not state.jobs and executor.idle:
                    desk.serve(floor, now=True)
                    if executor.idle:
                        break
                loop.step()
        finally:
            executor.close()
    store.close()
    return interrupt.asked and bool(lead.unfinished)


class _OverDevices:
    """Jobs come as an ordinary arrival, and the scheduler says where to; they go from wherever they
    are."""

    def __init__(self, lead: "Lead", executor: DeviceExecutor, targets: dict[str, Target]) -> None:
        self._lead = lead
        self._executor = executor
        self._targets = targets
        self._leaving: set[str] = set()

    def admit(self, job: JobSpec, data: PreparedData) -> None:
        lead = self._lead
        lead.join(job, data)
        self._leaving.discard(job.name)
        request = request_of(job, data, self._targets, base=lead.spec.base.model)
        self._executor.add(replace(request, arrival_s=lead.clock.now()))

    def waits(self, job: str) -> bool:
        """Where and when it trains is for the scheduler to say."""
        return False

    def look_after(self) -> None:
        """Whoever was to leave and lost its device leaves from wherever it is by now."""
        self._leaving -= self._lead.results.keys()
        for job in sorted(self._leaving):
            if not self._executor.is_leaving(job):
                self._let_go(job)

    def dismiss(self, job: str) -> None:
        self._let_go(job)
        if job in self._lead.unwritten:
            # Whoever asked is told of an end by its file.
            raise SpecError(f"{job} is over, but {self._lead.unwritten[job]}")

    def _let_go(self, job: str) -> None:
        self._leaving.add(job)
        if self._executor.give_up(job, CANCELLED, "cancelled") or job in self._lead.results:
            return
        self._lead.cancelled(job, self._targets)
        self._executor.withdraw(job, CANCELLED)


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
    with using_threads(None if device.type == "cuda" else 1):
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
        self.spec = spec
        self.data = dict(data)
        self.directory = directory
        self.progress = progress
        self.on_result: Callable[[JobResult], None] = lambda result: None
        """Told of a job's end."""

        self.unwritten: dict[str, str] = {}
        """Jobs whose result is not on disk, and why."""

        self.clock = WallClock()
        kept = {job.name: over(directory, job) for job in spec.jobs}
        self.results: dict[str, JobResult] = {
            name: result for name, result in kept.items() if result is not None
        }
        self.nano_batch_tokens = spec.engine.nano_batch_tokens
        self._drivers = {
            job.name: JobDriver(job, data[job.name].train, data[job.name].evaluation)
            for job in self.unfinished.values()
        }
        """Mirrors of those in the workers, for the view."""

        self._budget = 0
        self._shown = False
        self._began = 0.0

    @property
    def unfinished(self) -> dict[str, JobSpec]:
        """By name: jobs that have not come to an end, in this run or before."""
        return {job.name: job for job in self.spec.jobs if job.name not in self.results}

    def join(self, job: JobSpec, data: PreparedData) -> None:
        """A job that comes later, or again."""
        others = tuple(each for each in self.spec.jobs if each.name != job.name)
        self.spec = replace(self.spec, jobs=(*others, job))
        self.results.pop(job.name, None)
        self.unwritten.pop(job.name, None)
        self.data[job.name] = data
        driver = self._drivers[job.name] = JobDriver(job, data.train, data.evaluation)
        driver.step = saved_steps(self.directory, job.name)
        if self._shown:
            self.progress.join(driver)

    def cancelled(self, job: str, targets: dict[str, Target]) -> None:
        """One that no worker has: what it has come to is in its newest checkpoint. If its adapter
        cannot be written it has failed, and may go on as such."""
        try:
            result = self._cancelled(job, targets)
        except (TloraError, OSError) as error:
            self.failed(job, f"it was cancelled, and its adapter could not be written: {error}")
        else:
            self._ended(result)

    def failed(self, job: str, reason: str) -> None:
        """One whose end no worker can tell: refused, or lost with its devices."""
        if job in self._drivers and job not in self.results:
            steps, total = saved_steps(self.directory, job), self._drivers[job].total_steps
            self._ended(replace(no_result(job, reason), steps=steps, total_steps=total))

    def _cancelled(self, job: str, targets: dict[str, Target]) -> JobResult:
        spec, folder = self.unfinished[job], self.directory.job(job)
        newest = find_newest(folder / "checkpoints").checkpoint
        result = replace(no_result(job, CANCELLED), status="cancelled")
        if newest is not None:
            export_matrices(folder / "adapter", newest.state.weights, spec, self.spec.base, targets)
            progress = newest.progress
            best = progress["best"] is not None and (folder / "best").is_dir()
            result = replace(
                result,
                steps=newest.state.step,
                total_steps=self._drivers[job].total_steps,
                **{name: progress[name] for name in KEPT_FIGURES},
                adapter=f"{job}/adapter",
                best_adapter=f"{job}/best" if best else None,
            )
        return result

    def begin(self, budget: int) -> None:
        lines = [over_before(each) for each in self.results.values()]
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
            self._shown = True

    def hear(self, device: int, message: Message) -> None:
        match message:
            case Ready():
                if not self._shown:
                    # From here on: before, workers load the base.
                    self.directory.event("began")
                    self._began = time.time()
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
            case Lost(reason=cause):
                self.directory.event("device_lost", device=device, cause=cause)
                self.progress.say(
                    f"device {device} was lost: {cause}; its jobs go on from their checkpoints"
                )
            case _:
                pass

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
        self.unwritten.pop(result.job, None)
        try:
            self.directory.write_result(result)
        except OSError as error:
            why = f"its result could not be written: {error.strerror or error}"
            self.unwritten[result.job] = why
            self.progress.say(f"{result.job}: {why}")
        self.progress.on_end(result)
        self.on_result(result)

    def _noted(self, device: int, what: str, when: float, fields: dict[str, Any]) -> None:
        if what == "nano_batch":
            self.progress.on_nano_batch(outcome_of(fields))
        record = event_of(device, what, when, fields, began=self._began)
        # As with all events, no job depends on it.
        with suppress(OSError):
            self.directory.append(self.directory.root / "events.jsonl", record)
