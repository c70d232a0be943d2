"""Jobs on their way into a group of ranks, which trains others meanwhile.

All ranks hear of a job at the same agreement, and each opens its data. Once all have them they
choose where it is to live, and whoever takes it in reads its checkpoint or draws its adapter. Once
that is done everywhere it is attached. Both are done by threads; when one is through on all ranks
is told by the control element (parallel/lock_step.py), so that all go on with it at the same turn.
"""

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, NamedTuple

from tlora.config import load_spec
from tlora.core.errors import JobFailed, SpecError
from tlora.core.job import JobSpec
from tlora.data.prepare import PreparedData, Preparer
from tlora.model.memory import is_out_of_memory
from tlora.runtime.arriving import Arrival, Verdict
from tlora.runtime.background import in_background
from tlora.training.driver import Status


class Opened(NamedTuple):
    job: JobSpec
    data: PreparedData


class Account(NamedTuple):
    """Of one rank, of a job that is here."""

    problem: str
    mark: str
    """What all ranks must see alike: its data, or the step that it goes on from."""


class Coming:
    """One job, as one rank sees it."""

    def __init__(self, name: str, opening: Future[Opened]) -> None:
        self.name = name
        self.began = time.perf_counter()
        self.opening = opening
        self.verdict: Verdict | None = None
        """How it ends, if it is not to be attached."""

        self.has_place = False
        self.arrival: Arrival | None = None
        """Where this rank takes it in."""

    @property
    def under_way(self) -> Future[Any] | None:
        """What this rank does for it now."""
        if not self.has_place:
            return self.opening
        return self.arrival.future if self.arrival is not None else None

    @property
    def is_here(self) -> bool:
        return self.under_way is None or self.under_way.done()

    def dismiss(self, status: Status, reason: str) -> None:
        """At the same agreement on all ranks."""
        self.verdict = Verdict(status, reason)
        if self.arrival is not None:
            self.arrival.dismiss(status, reason)

    def settle(self, arrival: Arrival | None) -> None:
        """It has a place, here or elsewhere."""
        self.has_place, self.arrival = True, arrival
        if arrival is not None and self.verdict is not None:
            arrival.dismiss(*self.verdict)

    def account(self, rank: int) -> Account:
        """It is here."""
        problem = self._problem()
        if problem:
            return Account(f"{problem} (rank {rank})", "")
        if not self.has_place:
            key = self.opening.result().data.key.encode()
            return Account("", f"data {hashlib.sha256(key).hexdigest()[:12]}")
        if self.arrival is None:
            return Account("", "")
        checkpoint = self.arrival.result().found.checkpoint
        return Account("", f"step {checkpoint.state.step if checkpoint is not None else 0}")

    def _problem(self) -> str:
        error = self.under_way.exception() if self.under_way is not None else None
        if error is not None:
            what = "out of memory: " if is_out_of_memory(error) else ""
            said = error.message if isinstance(error, JobFailed) else str(error)
            return f"{what}{said or type(error).__name__}"
        if self.arrival is not None and self.arrival.result().found.result is not None:
            # On several nodes, whose views of the directory differ for seconds.
            return "its earlier end is still seen here; ask for it again"
        return ""


def common_problem(accounts: Sequence[Account]) -> str:
    """What keeps the job from going on with all ranks; empty if nothing does."""
    problems = [each.problem for each in accounts if each.problem]
    if problems:
        return problems[0]
    if len({each.mark for each in accounts}) > 1:
        # On several nodes, whose views of a directory differ for seconds.
        seen = ", ".join(f"rank {rank} {each.mark}" for rank, each in enumerate(accounts))
        return f"ranks do not see the same of it: {seen}; ask for it again"
    return ""


class Newcomers:
    """Those that all ranks have heard of, in that order."""

    def __init__(self, directory: Path, preparer: Preparer) -> None:
        self._directory = directory
        self._preparer = preparer
        self._preparing = threading.Lock()
        self._coming: dict[str, Coming] = {}

    def __len__(self) -> int:
        return len(self._coming)

    def __iter__(self) -> Iterator[Coming]:
        return iter(self._coming.values())

    def __contains__(self, job: str) -> bool:
        return job in self._coming

    @property
    def away(self) -> tuple[bool, ...]:
        return tuple(not each.is_here for each in self)

    def here(self, away: Sequence[bool]) -> list[Coming]:
        """Those that no rank waits for any more, as was agreed."""
        return [each for each, waits in zip(self, away, strict=True) if not waits]

    def of(self, job: str) -> Coming:
        return self._coming[job]

    def begin(self, job: str) -> None:
        assert job not in self._coming, f"{job} is on its way"
        opening = in_background(lambda: self._open(job), f"arrival of {job}")
        self._coming[job] = Coming(job, opening)

    def remove(self, job: str) -> None:
        del self._coming[job]

    def wait(self, timeout_s: float) -> None:
        """Where nobody has anything else to do: until one is a step further, or for so long."""
        futures = [each.under_way for each in self if each.under_way is not None]
        left = [each for each in futures if not each.done()]
        if left:
            wait(left, timeout=timeout_s, return_when=FIRST_COMPLETED)
        else:
            # Another rank is not so far.
            time.sleep(timeout_s)

    def _open(self, name: str) -> Opened:
        path = self._directory / "resolved.yaml"
        job = next((each for each in load_spec(path).jobs if each.name == name), None)
        if job is None:
            # Another node may see an older file.
            raise SpecError(f"{path} has no such job here")
        with self._preparing:
            # Files may have changed since another job was opened on them.
            return Opened(job, self._preparer.anew().prepare(job))
