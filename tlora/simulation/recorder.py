"""What metrics need of a run, kept as it goes: a store that does not keep turns, and a watcher of
the executor's groups. A month of a cluster has tens of thousands of turns, each with the progress
of every running job; only what became of each job and of each group is kept."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tlora.control.protocols import Turn
from tlora.core.decision import Join, Move, Pause, Refuse, Resize, Start
from tlora.core.event import Arrival, Completion, EarlyExit, GpuFailure, JobFailure
from tlora.core.request import JobRequest
from tlora.core.state import JobState, Outcome, State
from tlora.simulation.executor import Stretch


@dataclass(slots=True)
class JobRecord:
    """One job, from its arrival to its end."""

    state: JobState
    """As the loop keeps it; it stays as it was when the job ended."""

    steps: float = 0.0
    """Made in all, those lost to failures too."""

    due_s: float = 0.0
    """Of solo training that was its fair due while it was in a group."""

    ended_s: float | None = None
    outcome: Outcome | None = None
    reason: str | None = None
    """Why it was refused or failed, if it was."""

    due_mark: float | None = None
    """What was due to it in all when it last entered a group; None while it waits."""

    @property
    def request(self) -> JobRequest:
        return self.state.request

    def enter(self) -> None:
        self.due_mark = self.state.fair_s

    def leave(self) -> None:
        if self.due_mark is not None:
            self.due_s += self.state.fair_s - self.due_mark
            self.due_mark = None

    def end(self, time: float, outcome: Outcome, reason: str | None = None) -> None:
        self.leave()
        self.ended_s, self.outcome, self.reason = time, outcome, reason


@dataclass(slots=True)
class Recorder:
    state: State
    jobs: dict[str, JobRecord] = field(default_factory=dict[str, JobRecord])
    stretches: list[Stretch] = field(default_factory=list[Stretch])
    decided_s: list[float] = field(default_factory=list[float])
    regroups: int = 0
    """Moves, pauses and resizes."""

    done: int = 0

    def record(self, turn: Turn) -> None:
        """As the loop calls it: events are in the state, decisions are not."""
        self.decided_s.append(turn.decided_s)
        for event in turn.events:
            match event:
                case Arrival(request=request):
                    self.jobs[request.name] = JobRecord(self.state.jobs[request.name])
                case Completion(job=job):
                    self._end(job, turn.time, "completed")
                case EarlyExit(job=job):
                    self._end(job, turn.time, "exited")
                case JobFailure(job=job, reason=reason):
                    self._end(job, turn.time, "failed", reason)
                case GpuFailure():
                    for each in self.state.jobs.values():
                        if each.group is None:
                            self.jobs[each.name].leave()
                case _:
                    pass
        for decision in turn.decisions:
            match decision:
                case Start(jobs=jobs):
                    for job in jobs:
                        self.jobs[job].enter()
                case Join(job=job):
                    self.jobs[job].enter()
                case Pause(job=job):
                    self.jobs[job].leave()
                    self.regroups += 1
                case Move() | Resize():
                    self.regroups += 1
                case Refuse(job=job, reasons=reasons):
                    self._end(job, turn.time, "refused", str(reasons))

    def turns(self) -> Iterable[Turn]:
        """None are kept."""
        return ()

    def on_stretch(self, stretch: Stretch) -> None:
        self.stretches.append(stretch)
        seconds = stretch.end - stretch.trains_from
        for job, rate in stretch.rates.items():
            self.jobs[job].steps += rate * seconds

    def _end(self, job: str, time: float, outcome: Outcome, reason: str | None = None) -> None:
        self.jobs[job].end(time, outcome, reason)
        self.done += 1
