"""Several tasks on several devices: studies decide who goes on, the plan between tasks decides on
which devices, and workers train.

A trial asks after every evaluation and waits for the answer, so that a study sees each one before
the next step, as it does where all is in one process: what is decided does not depend on how long a
message takes. Everything is in the log before it is done. Who trains stays where it is; the tasks
are dealt anew when a device has nothing to do or is lost, and within a task trials move to a device
that would idle.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from tlora.core.clock import Clock
from tlora.core.decision import Pause, Reasons, Start
from tlora.core.errors import TloraError
from tlora.core.event import Event, GpuFailure, GpuRepair, JobFailure
from tlora.core.plan import Plan
from tlora.core.request import JobRequest
from tlora.runtime.directory import JobResult, RunDirectory
from tlora.runtime.executors.devices import DeviceExecutor
from tlora.runtime.executors.messages import Asked, Detached, Ended, Message, NoRoom
from tlora.runtime.executors.worker import no_result
from tlora.runtime.resuming import finished, is_saved_with
from tlora.runtime.sweeps.course import Course
from tlora.runtime.sweeps.prices import tokens_with_evaluations
from tlora.runtime.sweeps.view import View
from tlora.schedule.tasks import TaskPlan, TaskWork, balanced, dealt, plan_tasks
from tlora.tuning.events import Action, Attach, Evaluated, Exit, Hold, Spent
from tlora.tuning.outlook import phases_left
from tlora.tuning.study import Phase, Trial

LOOK_EVERY_S = 0.5
"""How often requests of people are looked for."""

MOVE_WORTH_S = 0.5
"""Trials of a device that is through sooner than this are not moved to another one."""


@dataclass(frozen=True, slots=True)
class Dealt:
    """Which task has which device, and the plan that says so, if one does."""

    tasks: dict[int, str]
    plan: TaskPlan | None = None


class Dealer(Protocol):
    """Decides between tasks. `on`: the devices that are up, and whose trials are there."""

    def __call__(self, works: list[TaskWork], on: Mapping[int, str | None]) -> Dealt: ...


def by_plan(works: list[TaskWork], on: Mapping[int, str | None]) -> Dealt:
    plan = plan_tasks(works, len(on))
    return Dealt(dealt(plan, works, on), plan)


@dataclass(slots=True)
class TaskRun:
    """A task, and its trials that wait for a device."""

    course: Course
    rate: float
    """Tokens per second of a device that trains its trials together, predicted."""

    usual_tokens: float
    """Of a trial that nobody has named yet."""

    queue: list[str] = field(default_factory=list[str])

    @property
    def name(self) -> str:
        return self.course.spec.task.name

    @property
    def coming(self) -> int:
        """Trials that its sampler has not named yet."""
        search, state = self.course.spec.search, self.course.state
        if self.course.sampler is None or search.trials is None or state.closed:
            return 0
        own = sum(each.plan.parent is None for each in state.trials.values())
        return max(0, search.trials - own)

    def work(self, devices: int) -> TaskWork:
        course = self.course
        phases = phases_left(
            course.state,
            course.spec.early_exit,
            {name: self.seconds(name) for name in course.state.trials},
            coming=self.coming,
            mean=self.usual_tokens / self.rate,
        )
        # A study that is over may have a trial that is to run up to its exit again.
        return TaskWork(self.name, phases or ((1.0,) * max(1, len(self.queue)),), devices)

    def seconds(self, trial: str) -> float:
        """Of the whole of it."""
        return tokens_with_evaluations(self.course.made[trial]) / self.rate

    def left(self, trial: str) -> float:
        found = self.course.state.trials[trial]
        return self.seconds(trial) * max(0.0, 1 - found.step / found.plan.total_steps)


class Conductor:
    def __init__(
        self,
        tasks: Iterable[TaskRun],
        directory: RunDirectory,
        view: View,
        clock: Clock,
        *,
        devices: int,
        bucket: int,
        request: Callable[[str], JobRequest],
        room_bytes: float | None = None,
        deal: Dealer = by_plan,
    ) -> None:
        """`request`: a trial as the executor knows it. `room_bytes`: for the adapters of a device;
        None where it is not asked."""
        self.tasks = {task.name: task for task in tasks}
        self.directory = directory
        self.view = view
        self.clock = clock
        self.bucket = bucket
        self.request = request
        self.deal = deal
        self.plan: TaskPlan | None = None
        """The last one."""

        self._room = dict.fromkeys(range(devices), room_bytes)
        self._up = set(range(devices))
        self._dealt: dict[int, str] = {}
        self._inbox: list[Message] = []
        self._known: set[str] = set()
        """Trials that the executor has heard of."""

        self._exiting: set[str] = set()
        """Given up where they are, their ends not told yet."""

        self._asked_for: object = None
        """What the tasks were last dealt on."""

        self._last_device: dict[str, int] = {}
        self._groups = 0
        self._executor: DeviceExecutor | None = None

    def lead(self, executor: DeviceExecutor) -> None:
        """To be called first: the executor tells its messages to `hear`."""
        self._executor = executor

    @property
    def executor(self) -> DeviceExecutor:
        assert self._executor is not None, "lead() comes first"
        return self._executor

    def hear(self, message: Message) -> None:
        """From a worker; looked at when the executor has."""
        if isinstance(message, Asked | Ended | Detached | NoRoom):
            self._inbox.append(message)

    @property
    def has_mail(self) -> bool:
        return bool(self._inbox)

    def conduct(self, should_stop: Callable[[], bool]) -> bool:
        """Until every study is over; True if it was stopped before. Raises TloraError when no
        device is left."""
        while not should_stop():
            self._look_for_requests()
            for task in self.tasks.values():
                task.course.ask()
            self._carry_out()
            self._tell_changes()
            if self._is_over():
                return False
            self._deal()
            self._wait()
        return True

    def close(self) -> None:
        """What workers said while they were stopped is in the log, too; it is carried out when the
        sweep goes on."""
        self.executor.close()
        self._read_inbox()
        self._tell_changes()

    def _is_over(self) -> bool:
        if self._exiting:
            return False
        return not any(self._has_work(task) for task in self.tasks.values())

    def _has_work(self, task: TaskRun) -> bool:
        """One that was given up may have to run up to its exit again, though the study is over."""
        state = task.course.state
        if not state.over or task.course.todo or task.queue:
            return True
        return any(self.executor.device_of(name) is not None for name in state.trials)

    def _tell_changes(self) -> None:
        for task in self.tasks.values():
            if task.course.changed:
                task.course.changed = False
                task.course.on_change(task.course)

    # Hearing

    def _wait(self) -> None:
        events = self.executor.wait(self.clock.now() + LOOK_EVERY_S)
        self._read_inbox()
        if self.executor.no_device_left is not None:
            # Not the trials' fault, and they are not told as failed: they can go on.
            raise TloraError(
                f"{self.executor.no_device_left}; what was trained is kept: mend that, and the "
                "same command goes on"
            )
        for event in events:
            self._happened(event)
        for task in self.tasks.values():
            course, limit = task.course, task.course.spec.search.max_seconds
            if limit is not None and course.seconds >= limit and not course.state.over_budget:
                course.tell(Spent("seconds", round(course.seconds, 1), limit))

    def _read_inbox(self) -> None:
        messages, self._inbox = self._inbox, []
        for message in messages:
            match message:
                case Asked():
                    self._asked(message)
                case Ended(job=name, result=result):
                    self._ended(JobResult(**result))
                    self._known.discard(name)
                case Detached(job=name) if name in self._exiting:
                    # It had been told to leave before it was given up.
                    self._write_result(name)
                    self._is_out(name)
                case NoRoom(job=name):
                    self._no_room(name)
                case _:
                    pass

    def _asked(self, message: Asked) -> None:
        name = message.job
        course, trial = self._task(name).course, self._trial(name)
        if trial.live:
            # What it passes by a second time, from a checkpoint, is known.
            if message.step > trial.history.step:
                course.tell(
                    Evaluated(
                        trial=name,
                        step=message.step,
                        tokens=message.tokens,
                        metrics=dict(message.metrics),
                    )
                )
                self._carry_out()
        elif trial.verdict is not None and message.step >= trial.verdict.step:
            # It was given up here before, and the process ended.
            self._give_up(name, str(trial.verdict))
        if message.waits and name not in self._exiting:
            self.executor.go_on(name)

    def _ended(self, result: JobResult) -> None:
        task, trial = self._task(result.job), self._trial(result.job)
        # A worker counts from when it began, which may be late.
        timed = replace(result, seconds=round(task.course.seconds, 3))
        self.directory.write_result(timed)
        if result.job in self._exiting:
            self._is_out(result.job)
        elif trial.live:
            task.course.tell_end(result)

    def _is_out(self, name: str) -> None:
        """One that was given up. A person may have asked for it again while it was leaving."""
        self._exiting.discard(name)
        if self._trial(name).phase is Phase.RUNNING:
            self._attach(name)

    def _no_room(self, name: str) -> None:
        device = self._last_device.get(name)
        if device is None:
            return
        there = [each for each in self._on(device) if each != name]
        self._room[device] = sum(self._trial(each).plan.adapter_bytes for each in there)
        self.view.say(f"{name}: no memory beside the others on device {device}; it waits")
        self._task(name).queue.insert(0, name)
        self._asked_for = None

    def _happened(self, event: Event) -> None:
        match event:
            case GpuFailure(gpus=gpus, reason=reason):
                self._up -= set(gpus)
                self.view.say(f"device {gpus[0]} was lost: {reason}")
                self.directory.event("lost", device=gpus[0], reason=reason)
                self._gather()
            case GpuRepair(gpus=gpus):
                self._up |= set(gpus)
            case JobFailure(job=name, reason=reason) if self._trial(name).live:
                # With its devices: no worker could say so.
                trial = self._trial(name)
                result = no_result(name, reason)
                result = replace(result, steps=trial.step, tokens_seen=trial.tokens)
                self._known.discard(name)
                self._ended(result)
            case _:
                pass

    def _gather(self) -> None:
        """Trials that were on a lost device wait for another one."""
        for task in self.tasks.values():
            for trial in task.course.state.trials.values():
                placed = self.executor.device_of(trial.name) is not None
                if placed or trial.name in task.queue:
                    continue
                if trial.name in self._exiting:
                    if not self.executor.is_somewhere(trial.name):
                        self._is_out(trial.name)
                        if not trial.live:
                            self._leave_again(trial)
                elif trial.phase is Phase.RUNNING:
                    self._attach(trial.name)

    # Carrying out

    def take_up(self, task: str) -> None:
        """Where a log ends: who was running runs again, and who was to go is gone."""
        for trial in list(self.tasks[task].course.state.trials.values()):
            has_result = (self.directory.root / trial.name / "result.json").exists()
            if trial.phase is Phase.RUNNING:
                self._attach(trial.name)
            elif trial.phase is Phase.EXITED and not has_result and trial.started:
                self._leave_again(trial)

    def _leave_again(self, trial: Trial) -> None:
        """It was given up just before the end of a process: if its last evaluation is in a
        checkpoint its adapters are on disk; if not it runs up to its exit again."""
        verdict = trial.verdict
        if verdict is None or is_saved_with(self.directory, trial.name, verdict.step):
            self._write_result(trial.name)
        else:
            self._task(trial.name).queue.append(trial.name)

    def _carry_out(self) -> None:
        for task in self.tasks.values():
            while task.course.todo:
                self._do(task, task.course.todo.popleft())

    def _do(self, task: TaskRun, action: Action) -> None:
        match action:
            case Attach(trial=name):
                self._attach(name)
            case Hold(trial=name):
                self._withdraw(task, name)
                if self.executor.device_of(name) is not None:
                    reasons = Reasons(why="it has warmed up and waits for the others")
                    self.executor.apply(Pause(job=name, group="", reasons=reasons))
            case Exit(verdict=verdict):
                self._withdraw(task, verdict.trial)
                self._give_up(verdict.trial, str(verdict))
                task.course.changed = True

    def _withdraw(self, task: TaskRun, name: str) -> None:
        if name in task.queue:
            task.queue.remove(name)

    def _give_up(self, name: str, reason: str) -> None:
        if self.executor.give_up(name, reason):
            self._exiting.add(name)
        else:
            self._leave_again(self._trial(name))

    def _write_result(self, name: str) -> None:
        self._task(name).course.write_result(self._trial(name), self.directory)

    def _attach(self, name: str) -> None:
        """As soon as its task has a device with room."""
        task, trial = self._task(name), self._trial(name)
        if name in self._exiting:
            # It is still on its way out: `_is_out` brings it back.
            return
        if name in task.queue or self.executor.device_of(name) is not None:
            return
        result = finished(self.directory, task.course.made[name].job)
        if result is not None:
            if task.course.is_end_of(trial, result):
                # The process came to its own end before it could be told.
                task.course.tell_end(result)
                return
            (self.directory.root / name / "result.json").unlink(missing_ok=True)
        task.queue.append(name)
        self._asked_for = None

    # Dealing

    def _deal(self) -> None:
        """Tasks to devices, if that can change anything; then trials to the devices of their
        tasks."""
        on = self._owners()
        works = [
            task.work(list(on.values()).count(task.name))
            for task in self.tasks.values()
            if self._has_work(task)
        ]
        asked_for = (
            on,
            [(work.name, work.now) for work in works],
            [list(task.queue) for task in self.tasks.values()],
        )
        waits = any(task.queue and task.name in on.values() for task in self.tasks.values())
        idle = any(owner is None for owner in on.values())
        if not (waits or idle) or asked_for == self._asked_for:
            return
        found = self.deal(works, on)
        if found.plan is not None and found.plan != self.plan:
            self._note_plan(found.plan)
        self._assign(found.tasks)
        for task in self.tasks.values():
            devices = [device for device, name in found.tasks.items() if name == task.name]
            self._place(task, devices)
            self._balance(task, devices)
        self._asked_for = (
            self._owners(),
            asked_for[1],
            [list(task.queue) for task in self.tasks.values()],
        )

    def _owners(self) -> dict[int, str | None]:
        """The devices that are up, and whose trials are wanted there."""
        found: dict[int, str | None] = dict.fromkeys(sorted(self._up))
        for task in self.tasks.values():
            for name in task.course.state.trials:
                device = self.executor.device_of(name)
                if device in found:
                    found[device] = task.name
        return found

    def _note_plan(self, plan: TaskPlan) -> None:
        self.plan = plan
        self.directory.event("planned", **asdict(plan))

    def _assign(self, tasks: dict[int, str]) -> None:
        for device in sorted(set(tasks) | set(self._dealt)):
            if tasks.get(device) != self._dealt.get(device):
                self.directory.event("assigned", device=device, task=tasks.get(device))
        self._dealt = dict(tasks)

    def _place(self, task: TaskRun, devices: list[int]) -> None:
        """Those that wait, each where least is left to do, if there is room."""
        for name in list(task.queue):
            size = self._trial(name).plan.adapter_bytes
            roomy = [each for each in devices if self._has_room(each, size)]
            if roomy:
                task.queue.remove(name)
                self._send(name, min(roomy, key=lambda each: (self._load(task, each), each)))

    def _balance(self, task: TaskRun, devices: list[int]) -> None:
        loads = {device: {name: task.left(name) for name in self._on(device)} for device in devices}
        for name, device in balanced(loads, worth_s=MOVE_WORTH_S):
            self._send(name, device)

    def _send(self, name: str, device: int) -> None:
        if name not in self._known:
            self._known.add(name)
            self.executor.add(self.request(name))
        self._groups += 1
        self._last_device[name] = device
        self.executor.apply(
            Start(
                # Each trial by itself: workers fuse what is there, and nobody asks for its group.
                group=f"g{self._groups}",
                base=self.request(name).base,
                jobs=(name,),
                gpus=(device,),
                plan=Plan(bucket=self.bucket),
                weights=(self._task(name).course.made[name].job.train.weight,),
                reasons=Reasons(why=f"device {device} is {self._task(name).name}'s"),
            )
        )

    def _on(self, device: int) -> list[str]:
        return [
            name
            for task in self.tasks.values()
            for name in task.course.state.trials
            if self.executor.device_of(name) == device
        ]

    def _has_room(self, device: int, size: float) -> bool:
        room, there = self._room[device], self._on(device)
        used = sum(self._trial(name).plan.adapter_bytes for name in there)
        return room is None or not there or used + size <= room

    def _load(self, task: TaskRun, device: int) -> float:
        return sum(task.left(name) for name in self._on(device))

    def _task(self, trial: str) -> TaskRun:
        return next(task for task in self.tasks.values() if trial in task.course.state.trials)

    def _trial(self, name: str) -> Trial:
        return self._task(name).course.state.trials[name]

    # What people ask for

    def _look_for_requests(self) -> None:
        first = next(iter(self.tasks.values())).course
        for request in first.log.open_requests():
            courses = [each.course for each in self.tasks.values()]
            own = [each for each in courses if request.trial in each.state.trials]
            (own[0] if own else first).answer(request)
