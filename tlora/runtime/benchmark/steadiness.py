"""When our super-model has settled: it compiles its layers in the first nano-batches, and captures
a shape once it has seen that shape a few times. Jobs that come and go afterwards change neither.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tlora.model import launches
from tlora.model.compiling import graphs_compiled
from tlora.model.super_model import SuperModel

MOST_RUNS = 4

BEFORE_CAPTURE = launches.WARM_UP + launches.MEASURED + 1
"""Nano-batches of a shape until it may be captured, that one included."""


def settle(
    run: Callable[[], object],
    state: Callable[[], Hashable],
    *,
    enough: Callable[[], bool] = lambda: True,
    most: int = MOST_RUNS,
) -> int:
    """Run until a run changes nothing; how many there were."""
    for number in range(1, most + 1):
        before = state()
        run()
        if state() == before and enough():
            return number
    return most


@dataclass(slots=True)
class Graphs:
    """The books of one super-model: its graphs, and the jobs that came and went."""

    model: SuperModel
    compiled: int = 0
    """Graphs, in runs of this model; other models of the process compile too."""

    warm_up_runs: int = 0
    """Of the fused arm."""

    jobs: int = 0
    """Attached, trained and detached since that arm was warm."""

    jobs_unchanged: int = 0
    """Of these, in runs in which nothing was captured or compiled."""

    @property
    def captures(self) -> int:
        return self.model.captures

    def state(self) -> tuple[int, int]:
        return self.model.captures, graphs_compiled()

    @contextmanager
    def watched(self, jobs: int = 0) -> Iterator[None]:
        """A run in which so many jobs come and go."""
        before = self.state()
        yield
        after = self.state()
        self.compiled += after[1] - before[1]
        self.jobs += jobs
        self.jobs_unchanged += jobs if after == before else 0
