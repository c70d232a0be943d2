"""Where a run is asked to take jobs in and to let them go: requests are read from its store,
checked, kept on disk, handed to wherever the jobs train, and answered.

The process that has the run's directory looks at most once a second. What is accepted is on disk
before it is carried out, and answered after: whoever is killed in between finds the request open
and does it again, to the same end. A store that cannot be read stops no job.
"""

import sqlite3
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tlora.config import load_spec
from tlora.core.errors import SpecError, TloraError
from tlora.core.job import JobSpec, RunSpec
from tlora.core.wording import number_of
from tlora.data.prepare import PreparedData
from tlora.runtime.asking import REFUSED
from tlora.runtime.background import in_background
from tlora.runtime.data_lines import full_lines
from tlora.runtime.directory import JobResult
from tlora.runtime.elastic.roll import check_proven, enrol, newcomers
from tlora.runtime.resuming import read_result
from tlora.store.requests import Request, Requests

LOOK_EVERY_S = 1.0
CANCELLED = "a person cancelled it"
WAITS = "waits for a place"

AGAIN = ("cancelled", "failed", "paused")
"""Ends after which a job may go on, if a person wants it."""


class Floor(Protocol):
    """Where jobs train."""

    def admit(self, job: JobSpec, data: PreparedData) -> None:
        """Take it in between nano-batches, from its newest checkpoint or anew."""
        ...

    def waits(self, job: str) -> bool:
        """It was admitted, and has to wait until others leave."""
        ...

    def dismiss(self, job: str) -> None:
        """Let it go between nano-batches, its adapter kept; its end is told as that of any, as
        cancelled if it did not come to another one before."""
        ...


Prepare = Callable[[tuple[JobSpec, ...]], dict[str, PreparedData]]
"""The data of new jobs, checked. Raises what is wrong with them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Preparing:
    """Data of jobs that a request is about."""

    request: Request
    jobs: frozenset[str]
    data: Future[dict[str, PreparedData]]
    then: Callable[[dict[str, PreparedData]], str]
    """Takes the jobs in; what is answered."""


class Desk:
    def __init__(
        self,
        root: Path,
        run: RunSpec,
        running: Iterable[str],
        *,
        prepare: Prepare,
        say: Callable[..., None],
        proven_ranks: Collection[int] | None = None,
        in_turns: bool = False,
    ) -> None:
        """`run` has every job that is on record, `running` those that train now. `proven_ranks`:
        of exact isolation. `in_turns`: whoever serves here trains between its turns, and data are
        prepared meanwhile; what is asked after that waits, but for other jobs to leave."""
        self.root = root
        self.run = run
        self.running = set(running)
        self.admitted = 0
        """Jobs that were taken in, in all."""

        self._prepare = prepare
        self._say = say
        self._proven_ranks = proven_ranks
        self._looked = -LOOK_EVERY_S
        self._served: set[int] = set()
        """Requests that are answered, or will be looked at when a job has ended."""

        self._leaving: dict[str, list[Request]] = {}
        self._put_off: dict[str, list[Request]] = {}
        """Until the job has left."""

        self._in_turns = in_turns
        self._preparing: _Preparing | None = None
        self._requests: Requests | None = None
        try:
            self._requests = Requests(root / "state.sqlite")
        except (SpecError, OSError) as error:
            say(f"nothing can be asked of this run from elsewhere: {error}")

    @property
    def is_preparing(self) -> bool:
        """Data of jobs that are about to be taken in."""
        return self._preparing is not None

    def wait(self, timeout_s: float) -> None:
        """For what it is preparing, and no longer than so."""
        if self._preparing is not None:
            wait([self._preparing.data], timeout=timeout_s)

    def is_asked(self, *, now: bool = False) -> bool:
        """Somebody waits; looked for once a second, or `now`."""
        if self._preparing is not None and self._preparing.data.done():
            return True
        return bool(self._open(now=now))

    def serve(self, floor: Floor, *, now: bool = False) -> None:
        if self._preparing is not None:
            prepared = self._preparing
            if prepared.data.done():
                self._preparing = None
                self._carry_out(prepared.request, lambda: prepared.then(_data_of(prepared)))
        for request in self._open(now=now):
            preparing = self._preparing
            self._served.add(request.number)
            self._carry_out(request, lambda request=request: self._serve(request, floor))
            if self._preparing is not preparing:
                # Whatever comes next may be about these jobs.
                return

    def _carry_out(self, request: Request, act: Callable[[], str | None]) -> None:
        try:
            said = act()
        except TloraError as error:
            said = f"{REFUSED}{error}"
        except OSError as error:
            said = f"{REFUSED}{self.root}: {error.strerror or error}"
        if said is not None:
            self._answer(request, said)

    def ended(self, result: JobResult) -> None:
        """A job has, and its files are on disk."""
        self.running.discard(result.job)
        self._served -= {request.number for request in self._put_off.pop(result.job, ())}
        for request in self._leaving.pop(result.job, ()):
            if result.status == "cancelled":
                kept = "its adapter is kept" if result.adapter else "it has not begun"
                self._answer(request, f"cancelled after {number_of(result.steps, 'step')}; {kept}")
            else:
                self._answer(request, f"{REFUSED}{result.job} is over: {result.status}")

    def begin_again(self) -> None:
        """The floor was lost: what it was asked and has not done is asked again."""
        for asked in (self._leaving, self._put_off):
            for requests in asked.values():
                self._served -= {request.number for request in requests}
            asked.clear()
        self._looked = -LOOK_EVERY_S

    def close(self) -> None:
        if self._requests is not None:
            self._requests.close()
            self._requests = None

    def _open(self, *, now: bool) -> list[Request]:
        at = time.monotonic()
        if self._requests is None or (not now and at - self._looked < LOOK_EVERY_S):
            return []
        before, self._looked = self._looked, at
        try:
            found = self._requests.open_requests()
        except sqlite3.Error:
            return []
        waiting = self._in_turn([each for each in found if each.number not in self._served])
        if waiting:
            # Whoever serves them looks again.
            self._looked = before
        return waiting

    def _in_turn(self, waiting: list[Request]) -> list[Request]:
        """Those that need not wait for what is being prepared: jobs that leave, of which nothing
        else was asked."""
        if self._preparing is None:
            return waiting
        concerned, found = set(self._preparing.jobs), list[Request]()
        for each in waiting:
            if each.kind == "cancel" and each.trial not in concerned:
                found.append(each)
            else:
                concerned |= _jobs_of(each)
        return found

    def _answer(self, request: Request, said: str) -> None:
        what = f"{request.kind} {request.trial}".rstrip()
        self._say(f"asked to {what}: {said.removeprefix(REFUSED)}")
        if self._requests is not None:
            with suppress(sqlite3.Error):
                self._requests.answer(request.number, said)

    def _serve(self, request: Request, floor: Floor) -> str | None:
        """The answer; None if it comes when the job has ended."""
        match request.kind:
            case "submit":
                return self._submit(load_spec(request.body), request, floor)
            case "cancel":
                return self._cancel(self._job(request.trial), request, floor)
            case "resume":
                return self._resume(self._job(request.trial), request, floor)
            case other:
                raise SpecError(f"'{other}' is nothing that a run can be asked")

    def _submit(self, asked: RunSpec, request: Request, floor: Floor) -> str | None:
        new = newcomers(self.run, asked, root=self.root)
        # One that is on record may have been left out of the file, or its process have ended just
        # before it could answer.
        left = [
            job
            for job in asked.jobs
            if job not in new and job.name not in self.running and self._result(job.name) is None
        ]
        jobs = (*new, *left)

        def admit(data: dict[str, PreparedData]) -> str:
            self._admit(jobs, data, floor)
            return at_work()

        def at_work() -> str:
            names = [job.name for job in asked.jobs if job.name in self.running]
            if not names:
                return "nothing to do: all of these jobs are over"
            waiting = [name for name in names if floor.waits(name)]
            told = {
                "at work": [name for name in names if name not in waiting],
                "waiting for a place": waiting,
            }
            return "; ".join(f"{how}: {', '.join(who)}" for how, who in told.items() if who)

        return self._with_data(jobs, request, admit) if jobs else at_work()

    def _with_data(
        self,
        jobs: tuple[JobSpec, ...],
        request: Request,
        then: Callable[[dict[str, PreparedData]], str],
    ) -> str | None:
        """What `then` says, now or when the data are there."""
        if self._proven_ranks is not None:
            check_proven(jobs, self._proven_ranks)
        if not self._in_turns:
            return then(self._prepare(jobs))
        assert self._preparing is None, "one after the other"
        data = in_background(lambda: self._prepare(jobs), "data of newcomers")
        self._preparing = _Preparing(request, frozenset(job.name for job in jobs), data, then)
        return None

    def _admit(
        self, jobs: tuple[JobSpec, ...], data: dict[str, PreparedData], floor: Floor
    ) -> None:
        self.run = enrol(self.root, self.run, jobs)
        # A record for people; no job depends on it.
        with suppress(OSError), (self.root / "data.txt").open("a", encoding="utf-8") as file:
            file.write("\n".join(full_lines(data)) + "\n")
        for job in jobs:
            # From here on it is not over, whatever becomes of this process.
            (self.root / job.name / "result.json").unlink(missing_ok=True)
            self.running.add(job.name)
            self.admitted += 1
            floor.admit(job, data[job.name])

    def _cancel(self, job: JobSpec, request: Request, floor: Floor) -> str | None:
        if job.name not in self.running:
            result = self._result(job.name)
            raise SpecError(
                f"{job.name} is over: {result.status}"
                if result is not None
                else f"{job.name} is on record, but does not train in this run"
            )
        if job.name not in self._leaving:
            floor.dismiss(job.name)
        self._leaving.setdefault(job.name, []).append(request)
        if job.name not in self.running:
            # Its end was told meanwhile, before there was anybody to be told of it.
            result = self._result(job.name)
            assert result is not None
            self.ended(result)
        return None

    def _resume(self, job: JobSpec, request: Request, floor: Floor) -> str | None:
        if job.name in self._leaving:
            self._put_off.setdefault(job.name, []).append(request)
            return None
        if job.name in self.running:
            raise SpecError(f"{job.name} {WAITS if floor.waits(job.name) else 'is at work'}")
        result = self._result(job.name)
        if result is not None and result.status not in AGAIN:
            raise SpecError(f"{job.name} is over: {result.status}")

        def admit(data: dict[str, PreparedData]) -> str:
            self._admit((job,), data, floor)
            waits = floor.waits(job.name)
            if result is None:
                return WAITS if waits else "at work"
            return f"{WAITS + ', then ' if waits else ''}goes on after step {result.steps}"

        return self._with_data((job,), request, admit)

    def _job(self, name: str) -> JobSpec:
        for job in self.run.jobs:
            if job.name == name:
                return job
        raise SpecError(f"{self.root} has no job '{name}'")

    def _result(self, name: str) -> JobResult | None:
        return read_result(self.root / name / "result.json")


def _jobs_of(request: Request) -> set[str]:
    """That it is about, as far as it can be read."""
    jobs = request.body.get("jobs") if request.kind == "submit" else None
    named = [job.get("name") for job in jobs if isinstance(job, dict)] if jobs else []
    return {request.trial, *(str(name) for name in named)}


def _data_of(prepared: _Preparing) -> dict[str, PreparedData]:
    """What went wrong with them is the matter of who asked, whatever it is; the run goes on."""
    try:
        return prepared.data.result()
    except (TloraError, OSError):
        raise
    except Exception as error:
        raise SpecError(f"data cannot be prepared: {type(error).__name__}: {error}") from error
