"""When warming up is over, and the books of graphs."""

import pytest

from tlora.runtime.benchmark import steadiness
from tlora.runtime.benchmark.steadiness import Graphs, settle


class Changing:
    """A model whose graphs are as told after each run."""

    def __init__(self, *states: int) -> None:
        self.states = list(states)
        self.captures = 0

    def run(self) -> None:
        self.captures = self.states.pop(0)


@pytest.mark.parametrize(
    ("states", "runs"),
    [
        # Nothing compiles, as on a CPU.
        ([0], 1),
        ([1, 1], 2),
        ([1, 2, 2], 3),
        # It may never end.
        ([1, 2, 3, 4], 4),
    ],
)
def test_a_warm_up_ends_with_a_run_that_changes_nothing(states, runs) -> None:
    """But for a bound."""
    model = Changing(*states)
    assert settle(model.run, lambda: model.captures) == runs and not model.states


def test_a_warm_up_goes_on_until_a_shape_can_have_been_captured() -> None:
    """A run that changes nothing is not enough before that."""
    model = Changing(1, 1, 2, 2)
    seen = []
    runs = settle(
        lambda: (seen.append(1), model.run()),
        lambda: model.captures,
        enough=lambda: len(seen) >= 3,
    )
    assert runs == 4


def test_jobs_count_as_unchanged_only_if_their_run_captured_and_compiled_nothing(
    monkeypatch,
) -> None:
    """One run captures, one compiles, one does neither; of the process's graphs those of these
    runs are ours."""
    compiled = 7
    monkeypatch.setattr(steadiness, "graphs_compiled", lambda: compiled)
    model = Changing(1)
    graphs = Graphs(model)  # type: ignore[arg-type]
    with graphs.watched(8):
        model.run()
    with graphs.watched(4):
        compiled += 2
    compiled += 5
    with graphs.watched(2):
        pass
    assert (graphs.jobs, graphs.jobs_unchanged) == (14, 2)
    assert (graphs.captures, graphs.compiled) == (1, 2)
