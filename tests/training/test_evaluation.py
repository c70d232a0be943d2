"""Evaluations beside training: what they say, what they read, and what they leave alone."""

import pytest
from support.alone import alone, weights
from support.breaking import breaking, once
from support.tiny import (
    Fed,
    base_loss,
    batches,
    drive,
    evaluate,
    identical,
    sequences,
    tiny_engine,
    tiny_super_model,
)

from tlora.core.sequence import TokenSequence
from tlora.model.adapters import AdapterWeights
from tlora.training.compose import Kind
from tlora.training.engine import EVALUATION_WINDOW, Engine
from tlora.training.outcome import EvaluationDone


def test_evaluation_is_the_mean_over_all_trained_tokens(engine: Engine) -> None:
    """Dropout is off, and the mean is over tokens, not over rows or nano-batches."""
    rows = sequences(3, 25)
    job = Fed("job", [], dropout=0.5)
    job.attach(engine)
    done = evaluate(engine, "job", rows)
    assert done.loss == pytest.approx(base_loss(rows), rel=1e-6)
    assert (done.step, done.sequences, done.tokens) == (0, 25, sum(map(len, rows)))
    assert done.target_tokens == sum(row.num_targets for row in rows)


def test_evaluation_leaves_training_as_it_was() -> None:
    """A job that is evaluated between steps ends with the bits of one that is not."""

    def made() -> Fed:
        return Fed("job", batches(1, [4] * 4), dropout=0.3)

    solo, expected = alone(made)
    engine, job, rows = tiny_engine(), made(), sequences(9, 12)
    job.attach(engine)
    for _ in drive(engine, [job]):
        before = weights(engine, job)
        first = evaluate(engine, "job", rows)
        assert evaluate(engine, "job", rows) == first
        assert identical(weights(engine, job), before)
    assert job.losses == solo.losses
    assert identical(weights(engine, job), expected)


def test_a_job_trains_on_while_another_is_evaluated(engine: Engine) -> None:
    """A job's training waits for its own evaluation, not for others'."""
    job, other = Fed("job", batches(1, [2] * 10)), Fed("other", [])
    job.attach(engine)
    other.attach(engine)
    engine.evaluate("other", sequences(3, 60))
    kinds = [outcome.kind for outcome in drive(engine, [job])]
    last_evaluation = len(kinds) - 1 - kinds[::-1].index(Kind.EVALUATE)
    assert Kind.TRAIN in kinds[:last_evaluation]
    assert len(job.steps) == 10


class CountedRows:
    """Held-out rows that know how often they were read."""

    def __init__(self, rows: list[TokenSequence]) -> None:
        self.rows = rows
        self.reads = 0
        self.lost_from = len(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> TokenSequence:
        self.reads += 1
        if index >= self.lost_from:
            raise OSError("the disk is gone")
        return self.rows[index]


def offered_rows(engine: Engine, name: str, rows: CountedRows) -> list[int]:
    """How many rows each composition of an evaluation had to look at."""
    engine.evaluate(name, rows)
    offered: list[int] = []
    while engine.has_work():
        offered.append(len(engine._job(name).waiting().lengths))
        engine.run_nano_batch()
    return offered


def test_an_evaluation_looks_at_a_few_rows_at_a_time(engine: Engine) -> None:
    """However many there are: no composition sees more than a window, and a row is read once to be
    checked and once per evaluation. An engine whose window holds everything is noticed."""
    rows = CountedRows(sequences(3, 600))
    Fed("job", []).attach(engine)
    most = 1 + EVALUATION_WINDOW * engine.budget_tokens // min(map(len, rows.rows))
    offered = offered_rows(engine, "job", rows)
    assert max(offered) <= most < len(rows) // 4 and min(offered[:-1]) >= 2
    assert rows.reads == 2 * len(rows)
    offered_rows(engine, "job", rows)
    assert rows.reads == 3 * len(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tlora.training.engine.EVALUATION_WINDOW", 10**6)
        assert max(offered_rows(engine, "job", rows)) > most


@pytest.mark.parametrize("exact", [False, True])
def test_the_window_of_an_evaluation_changes_no_result(exact: bool) -> None:
    """Against all rows at once: the same loss to rounding; where rows keep their order, to the bit
    and in the same nano-batches, and the same steps of a neighbour."""

    def run(window: int) -> tuple[EvaluationDone, list[dict[str, int]], AdapterWeights]:
        engine = Engine(tiny_super_model(), budget_tokens=128, exact=exact)
        job, other = Fed("job", batches(1, [3] * 6), dropout=0.2), Fed("other", [])
        job.attach(engine)
        other.attach(engine)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tlora.training.engine.EVALUATION_WINDOW", window)
            # One of them longer than a whole window.
            long = sequences(4, 1, shortest=600, longest=600)
            engine.evaluate("other", [*sequences(3, 80), *long, *sequences(5, 20)])
            outcomes = list(drive(engine, [job]))
            while engine.has_work():
                outcomes.append(engine.run_nano_batch())
        (done,) = [done for outcome in outcomes for done in outcome.evaluations]
        return done, [outcome.tokens for outcome in outcomes], weights(engine, job)

    (done, shares, adapter), (whole, all_shares, expected) = run(4), run(10**6)
    if exact:
        assert (done, shares) == (whole, all_shares)
        assert identical(adapter, expected)
    # Company decides with whom a sequence shares a call of attention: 2e-10 was measured.
    assert done.loss == pytest.approx(whole.loss, rel=1e-8)
    assert (done.sequences, done.tokens) == (101, whole.tokens)


def test_a_held_out_row_that_can_no_longer_be_read_fails_its_own_job(engine: Engine) -> None:
    """In the midst of an evaluation; the neighbour goes on."""
    rows = CountedRows(sequences(3, 200))
    job, other = Fed("job", batches(1, [3] * 4)), Fed("other", [])
    job.attach(engine)
    other.attach(engine)
    engine.evaluate("other", rows)
    rows.lost_from = 150
    outcomes = list(drive(engine, [job]))
    while engine.has_work():
        outcomes.append(engine.run_nano_batch())
    (failure,) = [failure for outcome in outcomes for failure in outcome.failures]
    assert failure.job == "other" and "the disk is gone" in failure.message
    assert len(job.steps) == 4 and engine.jobs == ["job"]


def test_a_row_lost_before_a_replay_fails_its_own_job(engine: Engine) -> None:
    """The nano-batch breaks off, and what would be run again can no longer be read."""
    rows = CountedRows(sequences(3, 20))
    job, other = Fed("job", batches(1, [3] * 4)), Fed("other", [])
    job.attach(engine)
    other.attach(engine)
    engine.evaluate("other", rows)
    rows.lost_from = 5
    with breaking(engine, lambda: RuntimeError("broken"), once(at=1), "forward"):
        outcomes = list(drive(engine, [job]))
        while engine.has_work():
            outcomes.append(engine.run_nano_batch())
    (failure,) = [failure for outcome in outcomes for failure in outcome.failures]
    assert failure.job == "other" and "the disk is gone" in failure.message
    assert len(job.losses) == 4
    engine.check_integrity()
