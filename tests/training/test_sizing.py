"""How large nano-batches are changes nothing that is learnt."""

import pytest
from support.alone import as_alone
from support.breaking import breaking, full_device
from support.tiny import Fed, batches, sequences, tiny_engine, tiny_super_model, train

from tlora.training.controller import Controller
from tlora.training.engine import Engine
from tlora.training.size_search import ControllerSettings


def tuned_engine(start: int = 32) -> Engine:
    sizes = (32, 64, 128, 256)
    tuned = ControllerSettings(sizes=sizes, start=start, idle=256, limit=256, warm_ups=0)
    return Engine(tiny_super_model(), budget_tokens=start, controller=Controller(tuned))


def test_a_size_that_is_tuned_changes_nothing_that_is_learnt() -> None:
    """Nano-batches of several sizes give the steps of one size; the controller is told of each."""

    def job() -> Fed:
        return Fed("job", batches(1, [30] * 8), dropout=0.2)

    engine, tuned = tuned_engine(), job()
    outcomes = train(engine, [tuned])
    measures = [outcome.measure for outcome in outcomes if outcome.measure is not None]
    assert len({measure.budget for measure in measures}) > 1
    assert as_alone(engine, tuned, job)
    for outcome, measure in zip(outcomes, measures, strict=False):
        assert measure.rows == outcome.rows and measure.tokens == sum(outcome.tokens.values())
        assert measure.seconds == pytest.approx(outcome.seconds, abs=1e-6)
    # The last nano-batch of every batch has what is left, which does not fill it.
    assert {measure.full for measure in measures} == {True, False}


def test_the_controller_is_told_when_jobs_come_and_go() -> None:
    """And of what is not training."""
    engine = tuned_engine()
    first, second = Fed("first", batches(1, [4] * 2)), Fed("second", batches(2, [4]))
    groups = []
    for jobs in ([first], [second]):
        groups += [outcome.measure.group for outcome in train(engine, jobs) if outcome.measure]
    assert len(set(groups)) == 2 and groups == sorted(groups)
    engine.detach("second")
    engine.evaluate("first", sequences(3, 2))
    measure = engine.run_nano_batch().measure
    assert measure is not None and not measure.train and measure.group > groups[-1]


def test_exact_isolation_has_one_size() -> None:
    """A size that follows the clock would change the bits."""
    tuned = ControllerSettings(sizes=(64, 128), start=64, idle=64, limit=128)
    with pytest.raises(ValueError, match="one size"):
        Engine(tiny_super_model(), budget_tokens=64, exact=True, controller=Controller(tuned))


def test_no_room_for_a_token_is_refused() -> None:
    """A budget of nothing is a mistake that is told at once."""
    with pytest.raises(ValueError, match="room for a token, got 0"):
        tiny_engine(budget_tokens=0)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_lowers_the_limit_of_a_controller(where: str) -> None:
    """As without one, nobody fails and all end as alone; what did not fit is not tried again."""
    engine = tuned_engine(start=256)
    jobs = [Fed("one", batches(1, [30] * 6)), Fed("two", batches(2, [20] * 6), rank=7)]
    with breaking(engine, full_device, lambda ids: ids.numel() > 128, where):
        outcomes = train(engine, jobs)
    broken = [o.measure for o in outcomes if "out of memory" in (o.error or "")]
    assert broken and all(measure and measure.out_of_memory for measure in broken)
    assert len({measure.rows for measure in broken if measure}) == len(broken)
    assert engine.budget_tokens <= 128 and not any(outcome.failures for outcome in outcomes)
    assert as_alone(engine, jobs[0], lambda: Fed("one", batches(1, [30] * 6)))
    assert as_alone(engine, jobs[1], lambda: Fed("two", batches(2, [20] * 6), rank=7))


def test_a_long_sequence_goes_alone(engine: Engine) -> None:
    """Longer than the budget, it runs by itself in the smallest multiple that holds it."""
    well = Fed("well", batches(1, [3] * 4))
    long = Fed("long", [sequences(3, 1, shortest=300, longest=300)])
    outcomes = train(engine, [well, long])
    assert [outcome.rows for outcome in outcomes if "long" in outcome.tokens] == [384]
    assert [set(o.tokens) for o in outcomes if "long" in o.tokens] == [{"long"}]
    assert len(well.steps) == 4 and len(long.steps) == 1
