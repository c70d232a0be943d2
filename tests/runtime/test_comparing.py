"""What fusing gains: the same work on both sides, as much of it as was asked for."""

from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from support.models import job_spec, sequences_of, super_model, tiny_model

from tlora.core.job import JobSpec
from tlora.runtime import comparing
from tlora.runtime.comparing import Comparison, compare, shortened


class Data:
    """The part of prepared data that is trained on."""

    def __init__(self, *, seed: int) -> None:
        lengths = np.random.default_rng(seed).integers(3, 20, 12)
        self.train = sequences_of(lengths, seed=seed)


@pytest.fixture
def jobs() -> list[JobSpec]:
    return [job_spec("a", r=4), job_spec("b", r=2, seed=1), job_spec("c", r=8, seed=2)]


@pytest.fixture
def data(jobs) -> dict[str, Data]:
    return {job.name: Data(seed=number) for number, job in enumerate(jobs)}


def test_both_sides_count_the_tokens_of_the_same_steps(jobs, data) -> None:
    """All rows of one epoch, as a batch here is larger than the data."""
    found = compare(
        super_model(tiny_model()), jobs, data, budget_tokens=256, share=0.3, seconds=0.0
    )
    per_epoch = sum(len(row) for rows in data.values() for row in rows.train)
    assert (found.rounds, found.steps) == (1, 6)
    assert found.tokens == 2 * per_epoch


def test_rounds_go_on_until_the_time_is_over(jobs, data, monkeypatch) -> None:
    """By a clock that goes a second per look: two for each of the four runs of a round, and one
    between rounds."""
    ticks = count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(comparing, "time", clock)
    found = compare(
        super_model(tiny_model()), jobs, data, budget_tokens=256, share=0.0, seconds=20.0
    )
    assert (found.rounds, found.together_seconds, found.alone_seconds) == (3, 3.0, 9.0)


def test_a_job_takes_its_share_of_steps_but_at_least_two(jobs, data) -> None:
    """And never more than it has."""
    steps = [shortened(jobs[0], data["a"], share).train.max_steps for share in (0.0, 1.0, 9.0)]
    assert steps == [2, 3, 3]


def test_the_gain_is_the_ratio_of_the_times() -> None:
    """As the work is the same."""
    found = Comparison(rounds=1, steps=6, tokens=600, together_seconds=2.0, alone_seconds=6.0)
    assert (found.gain, found.together_rate, found.alone_rate) == (3.0, 300.0, 100.0)
