"""A nano-batch that breaks off changes nothing; who caused it fails, and nobody else."""

from collections.abc import Callable

import pytest
import torch
from support.alone import as_alone
from support.breaking import breaking, full_device, once
from support.tiny import (
    RARE,
    Fed,
    batches,
    drive,
    evaluate,
    identical,
    sequence,
    sequences,
    tiny_engine,
    train,
)

from tlora.training.engine import Engine


def holds(token: int) -> Callable[[torch.Tensor], bool]:
    return lambda ids: bool((ids == token).any())


def broken() -> Exception:
    return RuntimeError("a kernel gave up")


def two_jobs() -> list[Callable[[], Fed]]:
    return [
        lambda: Fed("one", batches(1, [8] * 3), dropout=0.1),
        lambda: Fed("two", batches(2, [1, 5, 3, 2]), rank=7),
    ]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_nano_batch_that_breaks_off_changes_nothing(where: str) -> None:
    """No weight moves, partial gradients are gone, the batches run again, and all end as alone."""
    engine = tiny_engine(budget_tokens=64)
    jobs = [make() for make in two_jobs()]
    for job in jobs:
        job.attach(engine)
    states = []

    def watch(number: int) -> None:
        states.append({name: engine.state(name) for name in engine.jobs})

    with breaking(engine, broken, once(at=4), where):
        for number, outcome in enumerate(drive(engine, jobs, before=watch)):
            assert (outcome.error is not None) == (number == 4)
            if number != 4:
                continue
            assert outcome.error == "RuntimeError: a kernel gave up"
            assert not outcome.steps and not outcome.failures
            for name, state in states[4].items():
                assert identical(engine.super_model.weights(name), state.weights)
                assert engine.state(name).step == state.step
                for rows in engine.super_model.views(name).values():
                    assert not rows.grad.any()
    for job, make in zip(jobs, two_jobs(), strict=True):
        assert job.failure is None and as_alone(engine, job, make)


def test_gradients_are_said_to_be_zero_where_they_are_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels do not read them then. Batches of one nano-batch and of several, and one that breaks
    off when a part of its gradients is there."""
    engine = tiny_engine(budget_tokens=32)
    entered = engine.super_model.routed
    said: list[bool] = []

    def watched(batch, *, train):
        for segment in batch.segments if train else []:
            grads = [rows.grad for rows in engine.super_model.views(segment.job).values()]
            assert segment.zero_grad == (not any(grad.any() for grad in grads))
            said.append(segment.zero_grad)
        return entered(batch, train=train)

    monkeypatch.setattr(engine.super_model, "routed", watched)
    jobs = [make() for make in two_jobs()]
    for job in jobs:
        job.attach(engine)
    with breaking(engine, broken, once(at=3), "backward"):
        outcomes = list(drive(engine, jobs))
    assert any(outcome.error for outcome in outcomes)
    assert True in said and False in said


def test_a_job_that_cannot_run_alone_is_the_one_that_fails() -> None:
    """A row that always breaks, last in a batch of many nano-batches, fails its job after a trial
    by itself; the neighbours, whose batches are as long, end as alone."""
    engine = tiny_engine(budget_tokens=64)
    good = [
        lambda: Fed("one", batches(1, [12] * 2), dropout=0.1),
        lambda: Fed("two", batches(2, [12] * 2)),
    ]
    jobs = [make() for make in good]
    bad = Fed("bad", [*batches(5, [4]), [*sequences(6, 12), sequence([3, RARE, 4])]])
    with breaking(engine, broken, holds(RARE), "forward"):
        outcomes = train(engine, [jobs[0], bad, jobs[1]])
    assert bad.failure is not None and len(bad.steps) == 1
    assert "step 2: RuntimeError" in str(bad.failure)
    assert sum(outcome.error is not None for outcome in outcomes) <= 3
    assert engine.jobs == ["one", "two"]
    for job, make in zip(jobs, good, strict=True):
        assert job.failure is None and as_alone(engine, job, make)


def full_host() -> Exception:
    return RuntimeError("DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("error", [full_device, full_host, MemoryError])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_halves_the_budget(error: Callable[[], Exception], where: str) -> None:
    """Nano-batches shrink until they fit, nobody fails, and all end as alone."""
    engine = tiny_engine(budget_tokens=512)
    jobs = [Fed("one", batches(1, [30] * 2)), Fed("two", batches(2, [20, 3]), rank=7)]
    with breaking(engine, error, lambda ids: ids.numel() > 128, where):
        outcomes = train(engine, jobs)
    assert engine.budget_tokens == 128
    assert sum("out of memory" in (outcome.error or "") for outcome in outcomes) == 2
    assert not any(outcome.failures for outcome in outcomes)
    assert as_alone(engine, jobs[0], lambda: Fed("one", batches(1, [30] * 2)))
    assert as_alone(engine, jobs[1], lambda: Fed("two", batches(2, [20, 3]), rank=7))


def test_a_sequence_that_fits_nowhere_fails_its_job(engine: Engine) -> None:
    """A row too long for the memory by itself fails its job with the reason; others go on."""
    well = Fed("well", batches(1, [6] * 4))
    wide = Fed("wide", [*batches(2, [2]), sequences(3, 1, shortest=300, longest=300)])
    with breaking(engine, full_device, lambda ids: ids.numel() > 256, "forward"):
        train(engine, [well, wide])
    assert wide.failure is not None and len(wide.steps) == 1
    assert wide.failure.message == "step 2: out of memory on 300 tokens"
    assert engine.budget_tokens == 128
    assert as_alone(engine, well, lambda: Fed("well", batches(1, [6] * 4)))


def test_a_broken_evaluation_is_run_again(engine: Engine) -> None:
    """A forward-only nano-batch that breaks off starts over; a neighbour's half batch stays."""
    rows = sequences(3, 20)
    job, other = Fed("job", batches(1, [30])), Fed("other", [])
    other.attach(engine)
    expected = evaluate(engine, "other", rows).loss
    job.attach(engine)
    engine.evaluate("other", rows)
    with breaking(engine, broken, once(at=2), "forward"):
        outcomes = list(drive(engine, [job]))
    errors = [outcome.error for outcome in outcomes if outcome.error]
    (done,) = [done for outcome in outcomes for done in outcome.evaluations]
    assert len(errors) <= 1 and done.loss == pytest.approx(expected, rel=1e-12)
    assert as_alone(engine, job, lambda: Fed("job", batches(1, [30])))
