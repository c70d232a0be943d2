"""A job that leaves an engine goes on in another as if it had stayed, and leaves nothing behind."""

from dataclasses import replace

import pytest
import torch
from support.alone import ROUNDING, alone, as_alone, weights
from support.tiny import Fed, batches, distance, drive, identical, tiny_engine, train

from tlora.core.errors import JobFailed
from tlora.model.adapters import AdapterWeights
from tlora.training import moving
from tlora.training.engine import Engine
from tlora.training.optimiser import AdamW


def moved(
    job: Fed, first: Engine, second: Engine, *, after: int, partial: bool, kept: bool = False
) -> None:
    """Detach after some steps, in mid-batch if `partial`, and go on in another engine, where rows
    are waiting for it if `kept`."""
    job.attach(first)
    for _ in drive(first, [job]):
        if len(job.steps) == after:
            break
    if partial:
        job.feed(first)
        first.run_nano_batch()
        assert len(job.steps) == after
    state = first.state(job.name)
    first.detach(job.name)
    assert state.step == after and not first.jobs
    berth = None
    if kept:
        state = moving.bring(second.super_model, job.name, state).result()
        berth = moving.keep_rows(second.super_model, job.name, state)
        assert berth is not None and berth.entry is not None
    job.attach(second, weights=state.weights, state=state)
    assert berth is None or berth.entry is None, "the rows are the job's"
    list(drive(second, [job]))


@pytest.mark.parametrize(("partial", "kept"), [(False, False), (True, False), (True, True)])
def test_detach_and_attach_go_on_exactly(partial: bool, kept: bool) -> None:
    """Taken out and put into another engine, a job ends with the bits of one that stayed; what it
    had of an unfinished batch is dropped and run again."""

    def made() -> Fed:
        optimiser = AdamW(epsilon=1e-3, weight_decay=0.1)
        return Fed("job", batches(1, [12, 9, 14, 11, 8]), dropout=0.2, optimiser=optimiser)

    solo, expected = alone(made)
    job, second = made(), tiny_engine()
    moved(job, tiny_engine(), second, after=2, partial=partial, kept=kept)
    assert job.losses == solo.losses
    assert identical(weights(second, job), expected)


def test_a_lost_moment_shows() -> None:
    """The comparison above refuses a job that went on without its optimiser's moments."""

    def made() -> Fed:
        return Fed("job", batches(1, [4] * 4))

    _, expected = alone(made)
    job, first, second = made(), tiny_engine(), tiny_engine()
    job.attach(first)
    for _ in drive(first, [job]):
        if len(job.steps) == 2:
            break
    job.attach(second, weights=first.state("job").weights)
    list(drive(second, [job]))
    assert not distance(weights(second, job), expected) < ROUNDING


def test_nothing_of_a_job_outlives_it(engine: Engine) -> None:
    """Rows that a detached job leaves are cleared; who takes them over starts like anybody."""
    rows = batches(1, [12])[0]
    for name in ("first", "second"):
        job = Fed(name, [rows])
        job.attach(engine)
        engine.feed(name, rows, loss_scale=1.0)
        engine.run_nano_batch()
        engine.detach(name)
        for pool in engine.super_model.pools:
            for matrix in (pool.a, *pool.b):
                assert not any(tensor.any() for tensor in matrix.tensors)
    heir = Fed("heir", batches(2, [3] * 2))
    train(engine, [heir])
    assert as_alone(engine, heir, lambda: Fed("heir", batches(2, [3] * 2)))


def test_an_attach_that_breaks_off_leaves_nothing_behind(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room in one of the pools: the others give their rows back, and the job may try again."""

    def neighbour() -> Fed:
        return Fed("neighbour", batches(3, [4, 4]))

    pool, late = engine.super_model.pools[-1], Fed("late", batches(2, [4]))
    claim = pool.claim

    def no_room(weights: AdapterWeights) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(pool, "claim", no_room)
    with pytest.raises(torch.OutOfMemoryError):
        train(engine, [late])
    monkeypatch.setattr(pool, "claim", claim)
    assert not engine.jobs
    engine.check_integrity()
    other = neighbour()
    train(engine, [other])
    assert as_alone(engine, other, neighbour)


def test_no_rows_are_kept_for_a_state_of_another_adapter(engine: Engine) -> None:
    """It is found out before the job is attached, by the same check."""
    job, other = Fed("job", batches(1, [4])), Fed("other", batches(2, [4]), rank=2)
    train(engine, [job, other])
    state = replace(engine.state("job"), weights=engine.state("other").weights)
    with pytest.raises(ValueError, match="job 'job': the state belongs to another adapter"):
        moving.keep_rows(engine.super_model, "job", state)
    engine.check_integrity()


def test_what_holds_no_numbers_is_not_brought() -> None:
    """On a device nobody looks at it again where it is attached."""
    engine, job = tiny_engine(), Fed("job", batches(1, [4]))
    train(engine, [job])
    state, start = engine.state("job"), engine.super_model.new_adapter(job.spec)
    assert moving.bring_weights(engine.super_model, "job", start).result().keys() == start.keys()
    assert moving.bring(engine.super_model, "job", state).result().step == 1
    for adapter in (start, state.weights):
        next(iter(adapter.values())).a[1, 2] = float("inf")
    with pytest.raises(JobFailed, match="job 'job': its adapter holds weights on"):
        moving.bring_weights(engine.super_model, "job", start).result()
    with pytest.raises(JobFailed, match="job 'job': its adapter holds weights on"):
        moving.bring(engine.super_model, "job", state).result()
