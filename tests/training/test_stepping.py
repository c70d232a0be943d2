"""Each job steps by its own settings, and one that cannot step fails alone."""

from collections.abc import Callable

import pytest
import torch
from support.alone import as_alone, weights
from support.tiny import Fed, batches, distance, identical, train

from tlora.training import optimiser
from tlora.training.engine import Engine
from tlora.training.optimiser import AdamW


def test_each_job_has_its_own_rate_clip_and_optimiser(engine: Engine) -> None:
    """Jobs that differ only in how they step end where each ends alone, and apart."""
    rows = batches(1, [3, 1, 4, 2, 5])

    def made(name: str, **options: object) -> Callable[[], Fed]:
        return lambda: Fed(name, rows, **options)

    makers = [
        made("fast", learning_rate=1e-2, max_grad_norm=None),
        made("clipped", learning_rate=1e-3, max_grad_norm=0.05, optimiser=AdamW(epsilon=0.1)),
        made("other", learning_rate=1e-3, optimiser=AdamW(0.5, 0.9, 1e-3, weight_decay=0.3)),
        made("still", learning_rate=0.0, dropout=0.3),
    ]
    jobs = [make() for make in makers]
    train(engine, jobs)
    for job, make in zip(jobs, makers, strict=True):
        assert as_alone(engine, job, make)
    ends = [weights(engine, job) for job in jobs]
    start = engine.super_model.new_adapter(jobs[0].spec)
    assert identical(ends[3], start)
    for one, other in [(0, 1), (1, 2), (0, 2)]:
        assert distance(ends[one], ends[other]) > 1e-2


def test_each_job_is_clipped_to_its_own_norm(engine: Engine) -> None:
    """The first moment after one step is (1 - beta1) times the gradient: of the norm that was asked
    for, or as it came where that is less."""
    limits = {"tight": 0.01, "tighter": 0.001, "wide": 100.0, "none": None}
    rows = batches(1, [4])
    jobs = [Fed(name, rows, max_grad_norm=limit) for name, limit in limits.items()]
    train(engine, jobs)
    for job in jobs:
        moments = [rows.exp_avg.norm() for rows in engine.super_model.views(job.name).values()]
        came = job.steps[0].grad_norm
        expected = min(came, job.max_grad_norm or float("inf"))
        assert came > 0.01
        assert float(torch.stack(moments).norm()) == pytest.approx(0.1 * expected, rel=1e-3)


def test_a_step_that_cannot_be_taken_fails_its_job_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error inside the optimiser: the neighbour steps once and as alone."""

    def neighbour() -> Fed:
        return Fed("neighbour", batches(3, [4, 4]))

    step_jobs = optimiser.step_jobs

    def breaks_for_one(rows, due):
        if any(each.job == "broken" for each in due):
            raise OverflowError("int too large to convert to float")
        return step_jobs(rows, due)

    monkeypatch.setattr(optimiser, "step_jobs", breaks_for_one)
    broken, other = Fed("broken", batches(2, [4])), neighbour()
    train(engine, [broken, other])
    assert "too large" in str(broken.failure)
    assert other.failure is None
    assert as_alone(engine, other, neighbour)
    engine.check_integrity()


@pytest.mark.parametrize("once", [False, True])
def test_one_call_for_all_fails_nobody_but_the_culprit(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    """Jobs that step together, as on a GPU: one that cannot fails alone, and want of memory that
    passes fails nobody."""

    def neighbours() -> list[Fed]:
        return [Fed(name, batches(seed, [4, 4])) for seed, name in enumerate(("one", "two"))]

    step_jobs, calls = optimiser.step_jobs, []

    def breaks(rows, due):
        calls.append([each.job for each in due])
        if once and len(calls) == 1:
            raise torch.OutOfMemoryError("no room")
        if not once and "broken" in calls[-1]:
            raise OverflowError("int too large to convert to float")
        return step_jobs(rows, due)

    monkeypatch.setattr(optimiser, "step_jobs", breaks)
    monkeypatch.setattr(engine._rows, "in_calls", lambda due: [due] if due else [])
    broken, others = Fed("broken", batches(2, [4])), neighbours()
    train(engine, [broken, *others])
    assert len(calls[0]) == 3, "they step in one call"
    assert (broken.failure is None) == once
    for other, alone_again in zip(others, neighbours(), strict=True):
        assert other.failure is None
        assert as_alone(engine, other, lambda made=alone_again: made)
    engine.check_integrity()
