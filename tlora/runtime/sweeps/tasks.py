"""`tlora tune --devices N`: one task or several, over worker processes.

A worker for each device trains; this process has the studies, their one log, and the plan between
tasks. What is left on disk of a single task is what a sweep on one device leaves.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

from tlora.config import dump_spec
from tlora.core.clock import Clock, WallClock
from tlora.core.cluster import uniform_cluster
from tlora.core.errors import SpecError
from tlora.core.job import RunSpec
from tlora.core.request import JobRequest
from tlora.core.sweep import SweepSpec
from tlora.costs.groups import Costs
from tlora.data.prepare import PreparedData
from tlora.model.loading import load_shape, resolve_device
from tlora.model.targets import Target, find_targets
from tlora.runtime.budget import nano_batch_tokens
from tlora.runtime.data_lines import full_lines, start_lines
from tlora.runtime.devices import device_names
from tlora.runtime.directory import RunDirectory, replace_text
from tlora.runtime.elastic.places import check_unlimited
from tlora.runtime.environment import quieten_libraries
from tlora.runtime.executors.devices import DeviceExecutor, Devices
from tlora.runtime.executors.messages import Message, Noted, Ready, Said
from tlora.runtime.executors.notes import event_of, outcome_of
from tlora.runtime.executors.processes import WorkerProcesses, end_if_imported
from tlora.runtime.executors.worker import WorkerSettings
from tlora.runtime.interrupts import interruptible
from tlora.runtime.planning import ChosenProfile, choose_profile, new_costs
from tlora.runtime.requests import request_of
from tlora.runtime.room import room_bytes
from tlora.runtime.scheduled import proven, saved_steps
from tlora.runtime.sinks import check_trackers
from tlora.runtime.sweeps.conductor import Conductor, Dealer, TaskRun, by_plan
from tlora.runtime.sweeps.course import Course
from tlora.runtime.sweeps.opening import SweepOpening, opened
from tlora.runtime.sweeps.prices import together_rate, tokens_with_evaluations
from tlora.runtime.sweeps.replaying import as_tree, replay
from tlora.runtime.sweeps.report import write_sweep_report
from tlora.runtime.sweeps.room import worker_rows
from tlora.runtime.sweeps.tasks_view import TasksView, closing_task_lines, plan_lines
from tlora.runtime.sweeps.trials import MadeTrial, TrialMaker, representatives
from tlora.runtime.sweeps.tune import SweepDirectory, begin, kept_winner, make_trials, study_of
from tlora.runtime.sweeps.view import View, choose_view
from tlora.runtime.training import compiling_lines, describe_run, load_super_model
from tlora.schedule.tasks import TaskPlan, plan_tasks
from tlora.store.study import StudyLog, StudyTurn
from tlora.tuning.outlook import survivors_of
from tlora.tuning.results import Study, TaskStudies
from tlora.tuning.samplers import check_sampler, is_known_before, planned
from tlora.tuning.study import StudyState


class Workers(NamedTuple):
    devices: Devices
    clock: Clock


def processes(settings: list[WorkerSettings], *, lock: int | None = None) -> Workers:
    """One for each device. `lock`: of the run's directory."""
    threads = None if settings[0].device.startswith("cuda") else 1
    return Workers(WorkerProcesses(settings, threads=threads, lock=lock), WallClock())


def tune_on_devices(
    specs: Sequence[SweepSpec],
    *,
    output: Path | str,
    devices: int = 1,
    fresh: bool = False,
    profile: str | None = None,
    view: View | None = None,
    deal: Dealer = by_plan,
    workers: Callable[[list[WorkerSettings]], Workers] | None = None,
) -> TaskStudies:
    """As `tune`, for one task or several (`load_tasks`), over so many devices: GPUs where there
    are, one-thread processes otherwise. `deal` decides between tasks; `workers` starts them."""
    end_if_imported()
    quieten_libraries()
    check_trackers(specs[0].report_to)
    check_unlimited(specs[0].engine, "a sweep has search.max_parallel")
    check_sampler(specs[0].search.sampler)
    check_devices(specs, devices)
    names = device_names(resolve_device(specs[0].engine.device), devices)
    view = view or (choose_view() if len(specs) == 1 else TasksView())
    with opened(Path(output), specs, fresh=fresh) as opening:
        return _tune(opening, specs, names, profile, view, deal, workers)


def _tune(
    opening: SweepOpening,
    specs: Sequence[SweepSpec],
    names: list[str],
    profile: str | None,
    view: View,
    deal: Dealer,
    workers: Callable[[list[WorkerSettings]], Workers] | None,
) -> TaskStudies:
    turns, directory = opening.turns, SweepDirectory(opening.root)
    known = look_ahead(specs, turns, torch.device(names[0]), profile)
    view.say(*start_lines([spec.task for spec in specs], known.shared, output_of(directory)))
    view.say(*compiling_lines(known.run.engine, known.device))
    begun = directory if opening.goes_on else None
    proof = proven(known.run, known.device, known.data, known.budget, begun)
    opening.create()
    log = StudyLog(directory.root / "state.sqlite")
    try:
        replace_text(output_of(directory), "\n".join(full_lines(known.shared)) + "\n")
        sweep = TaskSweep(known, turns, directory, log, view, names)
        about = describe_run(known.run, known.device, proof) | {"devices": len(names)}
        if len(specs) == 1:
            about["task"] = specs[0].task.name
        directory.write_json(directory.root / "run.json", about)
        start = workers or partial(processes, lock=opening.taken.lock)
        interrupted = sweep.conduct(deal, start)
        done = sweep.so_far(interrupted=interrupted)
        if not interrupted:
            done = replace(done, studies=sweep.with_winners(done.studies))
        directory.write_json(directory.root / "study.json", done.as_json())
    finally:
        log.close()
        view.close()
        directory.close()
    try:
        write_sweep_report(directory.root)
    except OSError as error:
        view.say(f"the report could not be written: {error}")
    if len(specs) == 1:
        view.summary(done.only)
    else:
        view.say(*closing_task_lines(done))
    return done


def output_of(directory: RunDirectory) -> Path:
    return directory.root / "data.txt"


def check_devices(specs: Sequence[SweepSpec], devices: int) -> None:
    """More devices than trials cannot all be used."""
    if devices < 1:
        raise SpecError(f"must be at least 1, got {devices}", field="--devices")
    count = 0
    for spec in specs:
        search = spec.search
        own = len(planned(search)) if is_known_before(search) else search.trials or 1
        count += min(own, search.max_parallel or own)
    if devices > count:
        raise SpecError(
            f"{devices} were asked for, and no more than {count} trials train at once; ask for "
            "fewer devices, or more trials",
            field="--devices",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Outset:
    """All that is known before a worker starts."""

    specs: dict[str, SweepSpec]
    """By task, as all that follows."""

    makers: dict[str, TrialMaker]
    made: dict[str, dict[str, MadeTrial]]
    sized: dict[str, dict[str, MadeTrial]]
    """The trials, or some that could be, where a sampler names them as it goes."""

    device: torch.device
    """The first one: all are alike."""

    targets: dict[str, Target]
    budget: int
    room: float | None
    profile: ChosenProfile

    @property
    def first(self) -> SweepSpec:
        """Tasks share all but the task."""
        return next(iter(self.specs.values()))

    @property
    def run(self) -> RunSpec:
        return self.first.run(
            tuple(each.job for task in self.sized.values() for each in task.values())
        )

    @property
    def data(self) -> dict[str, PreparedData]:
        return {name: each.data for task in self.sized.values() for name, each in task.items()}

    @property
    def shared(self) -> dict[str, PreparedData]:
        """Trials share their data; where lengths are tried, the first one speaks for all."""
        return {task: next(iter(each.values())).data for task, each in self.sized.items()}

    def request(self, made: MadeTrial) -> JobRequest:
        return request_of(made.job, made.data, self.targets, base=self.first.base.model)


def look_ahead(
    specs: Sequence[SweepSpec],
    turns: Mapping[str, list[StudyTurn]],
    device: torch.device,
    profile: str | None,
) -> Outset:
    """Raises SpecError for settings or data that are wrong, of any task."""
    first = specs[0]
    shape = load_shape(first.base)
    makers = {spec.task.name: TrialMaker(spec, shape) for spec in specs}
    made = {
        spec.task.name: make_trials(spec, makers[spec.task.name], turns[spec.task.name])
        for spec in specs
    }
    sized: dict[str, dict[str, MadeTrial]] = {}
    for spec in specs:
        task = spec.task.name
        some = {f"{task}-{name}": params for name, params in representatives(spec).items()}
        sized[task] = made[task] or makers[task].make(some)
    outset = Outset(
        specs={spec.task.name: spec for spec in specs},
        makers=makers,
        made=made,
        sized=sized,
        device=device,
        targets=find_targets(shape),
        budget=0,
        room=None,
        profile=choose_profile(first.run((first.task,)), profile, device),
    )
    budget = nano_batch_tokens(outset.run, device, outset.data, shape.num_parameters())
    recompute = first.engine.gradient_checkpointing
    room = room_bytes(first.base, shape, device, budget_tokens=budget, recompute=recompute)
    return replace(outset, budget=budget, room=room)


class TaskSweep:
    """The studies of all tasks, their log and files, and the workers that train."""

    def __init__(
        self,
        outset: Outset,
        turns: Mapping[str, list[StudyTurn]],
        directory: RunDirectory,
        log: StudyLog,
        view: View,
        names: Sequence[str],
    ) -> None:
        self.outset = outset
        self.turns = turns
        self.directory = directory
        self.view = view
        self.names = list(names)
        self.plan: TaskPlan | None = None
        """Before any has begun."""

        states: dict[str, StudyState] = {}
        for task, spec in outset.specs.items():
            # Where there is room is a matter of each device.
            states[task] = StudyState.of(spec, None)
            replay(states[task], turns[task], spec)
        several = len(outset.specs) > 1
        trees = {task: as_tree(spec) for task, spec in outset.specs.items()}
        log.begin({"spec": trees[outset.first.task.name]} | ({"tasks": trees} if several else {}))
        self.courses = {
            task: Course(
                spec,
                states[task],
                log,
                outset.makers[task],
                outset.made[task],
                view,
                self._keep,
                task=task if several else None,
            )
            for task, spec in outset.specs.items()
        }
        self._kept = 0
        self._began: float | None = None
        self._keep_jobs()
        self._keep_studies()

    def conduct(self, deal: Dealer, start: Callable[[list[WorkerSettings]], Workers]) -> bool:
        """Until every study is over; True if a person stopped it before."""
        number, exact = self.outset.first.engine.nano_batch_tokens, None
        if self.outset.first.engine.isolation == "exact":
            exact = self.outset.budget
        limit = None if isinstance(number, str) else number
        root = self.directory.root.resolve()
        rows = worker_rows(
            self.outset.sized, self.outset.room, self.outset.specs, devices=len(self.names)
        )
        workers = start(
            [WorkerSettings(root, name, limit, exact, True, rows) for name in self.names]
        )
        clock = workers.clock
        conductor = Conductor(
            self._runs(),
            self.directory,
            self.view,
            clock,
            devices=len(self.names),
            bucket=self.outset.budget,
            request=lambda name: self.outset.request(self._made(name)),
            room_bytes=self.outset.room,
            deal=deal,
        )

        def hear(device: int, message: Message) -> None:
            self._hear(device, message)
            conductor.hear(message)

        with interruptible(on_first=self.view.on_interrupt) as interrupt:
            executor = DeviceExecutor(
                workers.devices,
                clock=clock,
                arrivals=(),
                saved_steps=lambda job: saved_steps(self.directory, job),
                watch=hear,
                should_stop=lambda: conductor.has_mail or interrupt(),
            )
            conductor.lead(executor)
            try:
                for task, course in self.courses.items():
                    begin(course, self.turns[task], lambda task=task: conductor.take_up(task))
                if isinstance(self.view, TasksView):
                    self.view.begin_tasks({t: each.state for t, each in self.courses.items()})
                else:
                    self.view.begin(next(iter(self.courses.values())).state)
                self._keep_studies()
                self._say_plan(conductor)
                return conductor.conduct(interrupt)
            finally:
                conductor.close()

    def so_far(self, *, interrupted: bool) -> TaskStudies:
        studies = {
            task: study_of(
                each.state, each.spec, self.directory.root, each.seconds, interrupted=interrupted
            )
            for task, each in self.courses.items()
        }
        return TaskStudies(
            output=self.directory.root,
            studies=studies,
            wall_s=max(study.wall_s for study in studies.values()),
            devices=len(self.names),
            predicted_s=round(self.plan.makespan, 3) if self.plan else None,
            one_after_another_s=round(self.plan.one_after_another, 3) if self.plan else None,
        )

    def with_winners(self, studies: Mapping[str, Study]) -> dict[str, Study]:
        """Their adapters are looked at on a base of this process's own: the workers are gone."""
        best = [study.best.name for study in studies.values() if study.best is not None]
        if not best:
            return dict(studies)
        jobs = tuple(self._made(name).job for name in best)
        model = load_super_model(self.outset.first.run(jobs), self.outset.device)
        found: dict[str, Study] = {}
        for task, study in studies.items():
            course = self.courses[task]
            folder = self.directory.root / "winner"
            winner = kept_winner(
                course.spec,
                study,
                course.made,
                model,
                self.view,
                folder / task if len(studies) > 1 else folder,
            )
            found[task] = replace(study, winner=winner)
        return found

    def _runs(self) -> list[TaskRun]:
        outset = self.outset
        devices = len(self.names)
        requests = {
            task: [outset.request(each) for each in some.values()]
            for task, some in outset.sized.items()
        }
        costs: Costs = new_costs(
            outset.profile.profile,
            [each for some in requests.values() for each in some],
            uniform_cluster(devices, per_node=devices),
        )
        return [
            TaskRun(
                course,
                rate=together_rate(requests[task], costs, bucket=outset.budget),
                usual_tokens=mean(map(tokens_with_evaluations, outset.sized[task].values())),
            )
            for task, course in self.courses.items()
        ]

    def _say_plan(self, conductor: Conductor) -> None:
        """Before it begins: which task goes where. One that goes on is planned as it stands."""
        live = [each for each in conductor.tasks.values() if not each.course.state.over]
        if not live:
            return
        self.plan = plan_tasks([each.work(0) for each in live], len(self.names))
        told: dict[str, str] = {}
        for each in live:
            state, exits = each.course.state, each.course.spec.early_exit
            going = survivors_of(state, exits, each.coming)
            told[each.name] = f"{len(state.trials) + each.coming} trials, about {going} to the end"
        self.view.say(
            *plan_lines(self.plan, len(self.names), told), f"profile: {self.outset.profile.source}"
        )

    def _made(self, trial: str) -> MadeTrial:
        return next(each.made[trial] for each in self.courses.values() if trial in each.made)

    def _keep(self, course: Course) -> None:
        """What others read while the sweep runs: the trials as a job file, and how they stand."""
        self._keep_jobs()
        self._keep_studies()

    def _keep_studies(self) -> None:
        done = self.so_far(interrupted=True)
        self.directory.write_json(self.directory.root / "study.json", done.as_json())

    def _keep_jobs(self) -> None:
        """On disk before a worker is to attach one."""
        made = [each.job for course in self.courses.values() for each in course.made.values()]
        if self._kept and len(made) == self._kept:
            return
        self._kept = len(made)
        jobs = tuple(made) or self.outset.run.jobs
        text = dump_spec(self.outset.first.run(jobs))
        replace_text(self.directory.root / "resolved.yaml", text)

    def _hear(self, device: int, message: Message) -> None:
        match message:
            case Ready():
                if self._began is None:
                    # From here on: before, workers load the base.
                    for course in self.courses.values():
                        course.begin_clock()
                    self.directory.event("began")
                    self._began = time.time()
            case Noted(what=what, time=when, fields=fields):
                self._noted(device, what, when, fields)
            case Said(lines=lines):
                self.view.say(*lines)
            case _:
                pass

    def _noted(self, device: int, what: str, when: float, fields: dict[str, Any]) -> None:
        if what == "nano_batch":
            self.view.on_nano_batch(outcome_of(fields))
        record = event_of(device, what, when, fields, began=self._began or 0.0)
        # As with all events, no job depends on it.
        with suppress(OSError):
            self.directory.append(self.directory.root / "events.jsonl", record)
