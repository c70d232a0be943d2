"""The executor over devices that train: decisions in, commands to workers out; messages in, events
out.

Every job has a place where it is, and one where it is wanted. A decision changes what is wanted;
a job that is elsewhere is told to leave, and is told to come once it is nowhere. So a move that is
overtaken by another decision, or whose source or target is lost, needs no case of its own.

Only plans over one device are run; a policy is to be set up so that it makes no others.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tlora.core.clock import Clock
from tlora.core.decision import Decision, Join, Move, Pause, Refuse, Resize, Start
from tlora.core.event import (
    Arrival,
    Completion,
    EarlyExit,
    Event,
    GpuFailure,
    GpuRepair,
    JobFailure,
)
from tlora.core.request import JobRequest
from tlora.runtime.executors.messages import (
    Attach,
    Attached,
    Command,
    Detach,
    Detached,
    Ended,
    GiveUp,
    GoOn,
    Lost,
    Message,
    NoRoom,
    Ready,
    Stepped,
    Tune,
)
from tlora.runtime.executors.rates import RateWatch, Running

RATES_S = 5.0
"""Rates are looked at so often."""

POLL_S = 0.2
"""How long a wish to stop may go unseen."""

MOST_SUSPICION = 2.0
"""Of a job: every time its device is lost with it, 1 / the jobs that were there. One that loses two
devices all by itself fails."""

MOST_LOSSES = 10
"""A device that is lost so often without a step in between is not brought back."""


class Devices(Protocol):
    """Workers, numbered from 0."""

    def __len__(self) -> int: ...

    def send(self, device: int, command: Command) -> None: ...

    def receive(self, timeout_s: float) -> list[tuple[int, Message]]:
        """What they have said, waiting no longer than so for a first message. A `Lost` is the last
        one of its worker."""
        ...

    def restart(self, device: int) -> None:
        """One that was lost."""
        ...

    def close(self) -> list[tuple[int, Message]]:
        """Stops all of them, their jobs checkpointed; what they said meanwhile."""
        ...


@dataclass(slots=True)
class _Place:
    """Where a job is."""

    device: int
    attached: bool = False
    """The worker has said so."""

    leaving: bool = False
    given_up: bool = False
    """It comes to its end there, and is not sent on. Its wish stays until then: the state has it in
    its group as long."""


@dataclass(slots=True)
class _Wish:
    """Where it is to be."""

    device: int
    group: str
    weight: float


@dataclass(slots=True)
class _Group:
    device: int
    bucket: int


class DeviceExecutor:
    def __init__(
        self,
        devices: Devices,
        *,
        clock: Clock,
        arrivals: Iterable[JobRequest],
        saved_steps: Callable[[str], int] = lambda job: 0,
        watch: Callable[[int, Message], None] = lambda device, message: None,
        should_stop: Callable[[], bool] = lambda: False,
        visit: Callable[[], None] = lambda: None,
        rates: RateWatch | None = None,
        on_failure: Callable[[str, str], None] = lambda job, reason: None,
    ) -> None:
        """`saved_steps`: what the newest checkpoint of a job has. `watch` is told every message.
        `should_stop`: `wait` returns early, with nothing, once it says so. `visit` is called while
        it waits: jobs may be added and given up there. `rates` finds who is slower than
        expected. `on_failure` is told of a job, and why, whose end no worker can tell: it was
        refused, or failed with its devices."""
        self.devices = devices
        self.clock = clock
        self._coming = sorted(arrivals, key=lambda request: request.arrival_s)
        self._saved_steps = saved_steps
        self._watch = watch
        self._should_stop = should_stop
        self._visit = visit
        self._rates = rates
        self._on_failure = on_failure
        self._rates_due = 0.0
        self._here: dict[str, JobRequest] = {}
        """Jobs that have arrived and are not over."""

        self._steps: dict[str, float] = {}
        self._places: dict[str, _Place] = {}
        self._wishes: dict[str, _Wish] = {}
        self._groups: dict[str, _Group] = {}
        self._down: set[int] = set()
        self._given_up: set[int] = set()
        self.no_device_left: str | None = None
        """Why, once every one was lost too often."""

        self._losses: dict[int, int] = {}
        self._suspicion: dict[str, float] = {}
        self._lost_jobs: set[str] = set()
        self._events: list[Event] = []
        """That follow from what was decided, to be told by the next `wait`."""

    @property
    def idle(self) -> bool:
        coming = self._coming or self._events or self._down - self._given_up
        return not (coming or self._wishes or self._places)

    def wait(self, until: float) -> Sequence[Event]:
        self._lost_jobs.clear()
        while True:
            self._visit()
            self._arrive()
            if self._events or self._should_stop():
                break
            next_arrival = self._coming[0].arrival_s if self._coming else until
            left = min(until, next_arrival) - self.clock.now()
            if left <= 0 and until <= next_arrival:
                break
            for device, message in self.devices.receive(min(max(left, 0.0), POLL_S)):
                self._watch(device, message)
                self._heard(device, message)
            self._events += self._slow_ones()
        events, self._events = self._events, []
        return events

    def progress(self) -> dict[str, float]:
        return {job: self._steps.get(job, 0.0) for job in [*self._wishes, *self._lost_jobs]}

    def apply(self, decision: Decision) -> None:
        match decision:
            case Start():
                if decision.plan.gpus != 1:
                    self._cannot_run(decision)
                    return
                live = {wish.group for wish in self._wishes.values()}
                self._groups = {name: self._groups[name] for name in live}
                group = _Group(decision.gpus[0], decision.plan.bucket)
                self._groups[decision.group] = group
                for job, weight in zip(decision.jobs, decision.weights, strict=True):
                    self._want(job, _Wish(group.device, decision.group, weight))
            case (
                Join(job=job, group=name, weight=weight) | Move(job=job, target=name, weight=weight)
            ):
                self._want(job, _Wish(self._groups[name].device, name, weight))
            case Pause(job=job):
                self._want(job, None)
            case Resize():
                self._resize(decision)
            case Refuse(job=job, reasons=reasons):
                self._forget(job)
                self._on_failure(job, str(reasons))

    def add(self, request: JobRequest) -> None:
        """A job that comes later, or again: nothing is held against it."""
        self._suspicion.pop(request.name, None)
        self._coming.append(request)
        self._coming.sort(key=lambda each: each.arrival_s)

    def device_of(self, job: str) -> int | None:
        """Where it is wanted."""
        wish, place = self._wishes.get(job), self._places.get(job)
        if wish is None or (place is not None and place.given_up):
            return None
        return wish.device

    def is_somewhere(self, job: str) -> bool:
        return job in self._places

    def is_leaving(self, job: str) -> bool:
        return job in self._places and self._places[job].leaving

    def go_on(self, job: str) -> None:
        """To one that asked."""
        if job in self._places:
            self.devices.send(self._places[job].device, GoOn(job))

    def give_up(self, job: str, reason: str, status: str = "stopped_early") -> bool:
        """Ends it where it is; its end is told as that of any. False if it is nowhere."""
        place = self._places.get(job)
        if place is None:
            return False
        place.leaving = place.given_up = True
        self.devices.send(place.device, GiveUp(job, reason, status))
        return True

    def withdraw(self, job: str, reason: str) -> None:
        """Ends one that is nowhere: it waits, or has not arrived yet."""
        assert job not in self._places, f"{job} is on device {self._places[job].device}"
        self._coming = [request for request in self._coming if request.name != job]
        if job in self._here:
            self._events.append(EarlyExit(self.clock.now(), job, reason))
        self._forget(job)

    def close(self) -> None:
        for device, message in self.devices.close():
            self._watch(device, message)

    def _cannot_run(self, decision: Start) -> None:
        reason = f"plans over several devices are not run here yet: {decision.plan}"
        for job in decision.jobs:
            self._fail(job, reason)

    def _resize(self, decision: Resize) -> None:
        group = self._groups[decision.group]
        jobs = [job for job, wish in self._wishes.items() if wish.group == decision.group]
        assert decision.plan.gpus == 1, f"{decision.group}: {decision.plan} is not run here"
        group.device, group.bucket = decision.gpus[0], decision.plan.bucket
        weights = dict(zip(jobs, decision.weights, strict=True))
        for job, weight in weights.items():
            self._want(job, _Wish(group.device, decision.group, weight))
        self.devices.send(group.device, Tune(group.bucket, weights))

    def _want(self, job: str, wish: _Wish | None) -> None:
        if wish is None:
            self._wishes.pop(job, None)
        else:
            # In the order of joining, as the state has it.
            old = self._wishes.get(job)
            if old is not None and old.group != wish.group:
                del self._wishes[job]
            self._wishes[job] = wish
        self._bring(job)

    def _bring(self, job: str) -> None:
        """One step from where it is to where it is wanted."""
        place, wish = self._places.get(job), self._wishes.get(job)
        if place is None:
            if wish is not None:
                bucket = self._groups[wish.group].bucket
                self._places[job] = _Place(wish.device)
                self.devices.send(wish.device, Attach(job, wish.weight, bucket))
        elif (wish is None or wish.device != place.device) and not place.leaving:
            place.leaving = True
            self.devices.send(place.device, Detach(job))

    def _leave(self, job: str) -> None:
        """It is nowhere now. One that was given up is for whoever did that to ask about again."""
        place = self._places.pop(job, None)
        if place is not None and place.given_up:
            self._wishes.pop(job, None)
        self._bring(job)

    def _heard(self, device: int, message: Message) -> None:
        now = self.clock.now()
        match message:
            case Attached(job=job, step=step):
                self._steps[job] = float(step)
                if job in self._places:
                    self._places[job].attached = True
            case Stepped(job=job, step=step):
                self._steps[job] = float(step)
                self._losses.pop(device, None)
            case Detached(job=job, step=step):
                if step is not None:
                    self._steps[job] = float(step)
                place = self._places.get(job)
                # One that was told to leave twice says so twice, and may be elsewhere by then.
                if place is None or (place.leaving and place.device == device):
                    self._leave(job)
            case NoRoom(job=job):
                self._places.pop(job, None)
                self._wishes.pop(job, None)
            case Ended(job=job, result=result):
                if job in self._here:
                    self._events.append(_end(now, job, result))
                self._forget(job)
            case Ready():
                if device in self._down:
                    self._down.remove(device)
                    self._events.append(GpuRepair(now, (device,)))
            case Lost(reason=reason):
                self._lost(device, reason)
            case _:
                pass

    def _lost(self, device: int, reason: str) -> None:
        now = self.clock.now()
        if device not in self._down:
            self._events.append(GpuFailure(now, (device,), reason))
            self._down.add(device)
        for job in [each for each, wish in self._wishes.items() if wish.device == device]:
            del self._wishes[job]
            self._lost_jobs.add(job)
        aboard = [each for each, place in self._places.items() if place.device == device]
        for job in aboard:
            self._steps[job] = float(self._saved_steps(job))
            self._suspicion[job] = self._suspicion.get(job, 0.0) + 1 / len(aboard)
            if self._suspicion[job] > MOST_SUSPICION - 1e-6:
                why = f"its device was lost again and again with it: {reason}"
                self._fail(job, why)
            # One that was on its way to another device goes there from its checkpoint.
            self._leave(job)
        self._losses[device] = self._losses.get(device, 0) + 1
        if self._losses[device] < MOST_LOSSES:
            self.devices.restart(device)
            return
        self._given_up.add(device)
        if len(self._given_up) == len(self.devices):
            why = self.no_device_left = f"no device is left: {reason}"
            for job in sorted(self._here):
                self._fail(job, why)
            self._coming.clear()

    def _fail(self, job: str, reason: str) -> None:
        self._events.append(JobFailure(self.clock.now(), job, reason))
        self._forget(job)
        self._on_failure(job, reason)

    def _slow_ones(self) -> list[Event]:
        now = self.clock.now()
        if self._rates is None or now < self._rates_due:
            return []
        self._rates_due = now + RATES_S
        jobs: dict[int, list[str]] = {}
        for job, wish in self._wishes.items():
            place = self._places.get(job)
            if place is None or place.given_up:
                continue
            if place.device == wish.device and place.attached:
                jobs.setdefault(wish.device, []).append(job)
        return self._rates.check(
            now,
            {
                device: Running(
                    requests=tuple(self._here[job] for job in each),
                    weights=tuple(self._wishes[job].weight for job in each),
                    bucket=self._groups[self._wishes[each[0]].group].bucket,
                    steps=tuple(self._steps[job] for job in each),
                )
                for device, each in jobs.items()
            },
        )

    def _arrive(self) -> None:
        now = self.clock.now()
        while self._coming and self._coming[0].arrival_s <= now:
            request = self._coming.pop(0)
            self._here[request.name] = request
            self._steps[request.name] = float(self._saved_steps(request.name))
            self._events.append(Arrival(now, request))
            if self.no_device_left is not None:
                # It would wait for ever.
                self._fail(request.name, self.no_device_left)

    def _forget(self, job: str) -> None:
        self._here.pop(job, None)
        self._wishes.pop(job, None)
        self._places.pop(job, None)
        self._steps.pop(job, None)


def _end(now: float, job: str, result: dict[str, object]) -> Event:
    reason = str(result.get("reason") or "")
    match result["status"]:
        case "completed":
            return Completion(now, job)
        case "stopped_early" | "cancelled":
            return EarlyExit(now, job, reason)
        case _:
            return JobFailure(now, job, reason)
