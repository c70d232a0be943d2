"""Who of a run has a place on its device, and who waits for one.

Books only: sizes and names in, names out. Jobs come in the order in which they wait, as many as
have room. Nobody is passed over: a large job that waits for room would wait for ever behind small
ones that come and go.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import count

from tlora.core.errors import SpecError
from tlora.core.job import EngineSpec, JobSpec
from tlora.data.prepare import PreparedData


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    job: JobSpec
    data: PreparedData


class Places:
    def __init__(
        self,
        size_of: Callable[[JobSpec], float] = lambda job: 0.0,
        *,
        room_bytes: float | None = None,
        most: int | None = None,
    ) -> None:
        """`size_of`: what a job takes of `room_bytes`; None: nobody knows of an end. `most`: jobs
        at once."""
        self.room_bytes = room_bytes
        self.most = most
        self._size_of = size_of
        self._sizes: dict[str, float] = {}
        self._turns: dict[str, int] = {}
        self._turn = count()
        self._waiting: dict[str, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, job: str) -> bool:
        return job in self._waiting

    @property
    def names(self) -> list[str]:
        """Of those that wait, in their order."""
        return list(self._waiting)

    @property
    def waiting(self) -> list[Waiting]:
        return list(self._waiting.values())

    def wait(self, job: JobSpec, data: PreparedData, *, again: bool = False) -> None:
        """Behind the others; `again`: it was called and did not fit, and keeps its turn among those
        to whom the same may have happened."""
        assert job.name not in self._waiting, f"{job.name} waits already"
        self._sizes[job.name] = self._size_of(job)
        self._waiting[job.name] = Waiting(job, data)
        if again:
            in_turn = sorted(self._waiting.items(), key=lambda each: self._turns[each[0]])
            self._waiting = dict(in_turn)
        else:
            self._turns[job.name] = next(self._turn)

    def leave(self, job: str) -> Waiting:
        return self._waiting.pop(job)

    def is_next(self, there: Collection[str]) -> bool:
        """Somebody may come to those who are there. An empty device takes whoever is first: that a
        job does not fit at all is for the device to say."""
        first = next(iter(self._waiting), None)
        if first is None or not there:
            return first is not None
        if self.most is not None and len(there) >= self.most:
            return False
        used = sum(self._sizes.get(name, 0.0) for name in there)
        return self.room_bytes is None or used + self._sizes[first] <= self.room_bytes

    def call(self, there: Collection[str]) -> list[Waiting]:
        """All who may come to those who are there; they wait no more."""
        called: list[Waiting] = []
        while self.is_next([*there, *(each.job.name for each in called)]):
            called.append(self.leave(next(iter(self._waiting))))
        return called

    def is_full(self, there: Iterable[str]) -> None:
        """One more did not fit."""
        self.room_bytes = sum(self._sizes.get(name, 0.0) for name in there)


def check_unlimited(engine: EngineSpec, instead: str) -> None:
    """Where somebody else decides who trains together."""
    if engine.max_parallel is not None:
        raise SpecError(f"is for a run on one device; {instead}", field="engine.max_parallel")
