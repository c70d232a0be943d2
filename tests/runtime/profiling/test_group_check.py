"""A group trained against its prediction, with a stand-in for the training."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.costs import new_profile

from tlora.core.errors import JobFailed
from tlora.runtime.benchmark.rounds import Run
from tlora.runtime.benchmark.workload import Workload
from tlora.runtime.profiling import group_check
from tlora.runtime.profiling.group_check import check_group, predicted_seconds
from tlora.runtime.profiling.profiling import with_group_check
from tlora.runtime.profiling.rig import NotMeasured

LENGTHS = (128, 512, 2048)
MODEL = SimpleNamespace(vocabulary=100, captures=0, settled=True)


@pytest.fixture(scope="module")
def profile():
    return new_profile()


def test_the_median_of_the_warm_runs_stands_beside_the_prediction(profile, monkeypatch) -> None:
    """The first run, which may compile, does not count."""
    factors = iter([50.0, 1.3, 1.1, 1.2])

    def train(model: object, work: Workload, jobs: object, budget: int) -> Run:
        assert budget == profile.budget_tokens and jobs == work.jobs
        return Run(next(factors) * predicted_seconds(profile, work), work.of(work.jobs))

    monkeypatch.setattr(group_check, "train_together", train)
    found = check_group(MODEL, profile, lengths=LENGTHS, largest_rank=64)  # type: ignore[arg-type]
    assert found.jobs == 8 and found.tokens > 8192
    assert found.measured_s / found.predicted_s == pytest.approx(1.2)
    assert found.error_pct == pytest.approx((1 / 1.2 - 1) * 100)


def test_runs_that_capture_graphs_do_not_count(profile, monkeypatch) -> None:
    model = SimpleNamespace(vocabulary=100, captures=0, settled=True)
    factors = iter([50.0, 40.0, 30.0, 1.3, 1.1, 1.2])

    def train(model: SimpleNamespace, work: Workload, *others: object) -> Run:
        model.captures = min(model.captures + 1, 2)
        return Run(next(factors) * predicted_seconds(profile, work), work.of(work.jobs))

    monkeypatch.setattr(group_check, "train_together", train)
    found = check_group(model, profile, lengths=LENGTHS, largest_rank=64)  # type: ignore[arg-type]
    assert found.measured_s / found.predicted_s == pytest.approx(1.2)


def test_a_group_that_would_take_long_is_not_trained(profile) -> None:
    """And the profile is kept, with a note."""
    slow = replace(profile, time=replace(profile.time, row_s=1.0))
    with pytest.raises(NotMeasured, match="2 steps each would take"):
        check_group(MODEL, slow, lengths=LENGTHS, largest_rank=64)  # type: ignore[arg-type]


def test_a_group_that_fails_leaves_the_profile_with_a_note(profile, monkeypatch) -> None:
    """Minutes of measuring are not thrown away."""

    def train(*args: object) -> Run:
        raise JobFailed("out of memory on 512 tokens", job="job-1")

    monkeypatch.setattr(group_check, "train_together", train)
    shape = SimpleNamespace(
        positions=4096, targets=[SimpleNamespace(in_features=64, out_features=64)]
    )
    found = with_group_check(profile, MODEL, shape)  # type: ignore[arg-type]
    assert found.group_check is None and found.points == profile.points
    assert found.notes[-1] == "no group was trained: job 'job-1': out of memory on 512 tokens"
