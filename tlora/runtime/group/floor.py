"""Where the jobs of a group come and go: what people ask of the run becomes commands that rank 0
brings to the next agreement of all ranks."""

from collections.abc import Callable
from contextlib import suppress

from tlora.core.errors import TloraError
from tlora.core.job import JobSpec
from tlora.data.prepare import PreparedData
from tlora.model.targets import Target
from tlora.runtime.elastic.desk import CANCELLED, Desk
from tlora.runtime.executors.messages import Admit, Command, GiveUp
from tlora.runtime.scheduled import Lead

LOOK_S = 0.2
"""For data of newcomers, at a time."""


class GroupFloor:
    """Of whoever leads the run."""

    def __init__(self, lead: Lead, desk: Desk, targets: dict[str, Target]) -> None:
        self._lead = lead
        self._desk = desk
        self._targets = targets
        self._commands: list[Command] = []
        self._admitted = 0
        """Jobs that had joined when the group began."""

        lead.on_result = desk.ended

    def begin(self, should_stop: Callable[[], bool]) -> None:
        """Ranks are about to start: whoever joins before they have is one of their jobs from the
        start. Where they have others, nobody waits for one whose data are being prepared."""
        self._desk.begin_again()
        self._serve_all(lambda: should_stop() or bool(self._lead.unfinished))
        asked, self._commands = self._commands, []
        self._commands = [
            each for each in asked if isinstance(each, GiveUp) and not self._has_left(each.job)
        ]
        self._admitted = self._desk.admitted

    def was_asked_for_more(self, should_stop: Callable[[], bool]) -> bool:
        """Of ranks that have come to their end: perhaps just before they could hear of it."""
        self._serve_all(should_stop)
        return self._desk.admitted > self._admitted

    def commands(self) -> list[Command]:
        """What people have asked of the run since the last time, as ranks are told of it."""
        self._desk.serve(self)
        commands, self._commands = self._commands, []
        return commands

    def admit(self, job: JobSpec, data: PreparedData) -> None:
        self._lead.join(job, data)
        self._commands.append(Admit(job.name))

    def waits(self, job: str) -> bool:
        return False

    def dismiss(self, job: str) -> None:
        self._commands.append(GiveUp(job, CANCELLED, "cancelled"))

    def close(self) -> None:
        self._desk.close()

    def _serve_all(self, is_enough: Callable[[], bool]) -> None:
        """What is being prepared too, where no rank is at work meanwhile."""
        self._desk.serve(self, now=True)
        while self._desk.is_preparing and not is_enough():
            self._desk.wait(LOOK_S)
            self._desk.serve(self, now=True)

    def _has_left(self, job: str) -> bool:
        """One that is to leave and that no rank has: from its newest checkpoint, where that can be
        exported; else the ranks take it in and let it go."""
        if job in self._lead.unfinished:
            with suppress(TloraError, OSError):
                self._lead.cancelled(job, self._targets)
        return job not in self._lead.unfinished
