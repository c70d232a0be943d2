"""NaN and infinity of one job reach nobody else."""

import re
from collections.abc import Callable

import pytest
import torch
from support.alone import alone, as_alone, weights
from support.tiny import (
    RARE,
    Fed,
    batches,
    drive,
    identical,
    sequence,
    sequences,
    tiny_engine,
    train,
)

from tlora.core.errors import JobFailed
from tlora.training import optimiser
from tlora.training.engine import Engine


def poison_adapter(engine: Engine) -> None:
    path = next(iter(engine.super_model.views("sick")))
    engine.super_model.views("sick")[path].value[0, 0] = float("nan")


def poison_token(engine: Engine) -> None:
    embedding = engine.super_model.model.get_input_embeddings().weight
    embedding.data[RARE] = float("nan")


@pytest.mark.parametrize("poison", [poison_adapter, poison_token])
def test_nan_fails_its_own_job_only(engine: Engine, poison: Callable[[Engine], None]) -> None:
    """The sick job ends with a reason that names its step and rows; its neighbours end as alone."""

    def made(name: str) -> Callable[[], Fed]:
        seed = {"before": 1, "after": 2}[name]
        return lambda: Fed(name, batches(seed, [3] * 5), dropout=0.1)

    before, after = made("before")(), made("after")()
    rows = [sequence([5, RARE, 7, 9, 4], origin="sick.jsonl:12")]
    sick = Fed("sick", [*batches(9, [2, 2]), rows, rows])

    def infect(number: int) -> None:
        if len(sick.steps) == 2 and sick.failure is None:
            poison(engine)

    train(engine, [before, sick, after], before=infect)
    assert sick.failure is not None and len(sick.steps) == 2
    # A NaN in the queries does not show in the loss: the CPU's attention takes it for -inf.
    what = "(the loss is nan|gradients or weights are no longer finite numbers)"
    assert re.search(f"{what} at step 3 .rows sick.jsonl:12.; the usual cause", str(sick.failure))
    assert engine.jobs == ["before", "after"]
    assert as_alone(engine, before, made("before"))
    assert as_alone(engine, after, made("after"))


def test_an_infinite_gradient_fails_its_own_job_only(engine: Engine) -> None:
    """A loss that is finite with a gradient that is not changes no weights and names the step."""
    well = Fed("well", batches(1, [3] * 3))
    well.attach(engine)
    sick = Fed("sick", [])
    sick.attach(engine)
    rows = sequences(5, 2)
    engine.feed("sick", rows, loss_scale=1e30)
    engine.request_step("sick", learning_rate=1e-2, max_grad_norm=1.0)
    outcomes = list(drive(engine, [well]))
    (failure,) = [failure for outcome in outcomes for failure in outcome.failures]
    assert failure.job == "sick" and "the gradient norm is inf at step 1 (rows" in failure.message
    assert as_alone(engine, well, lambda: Fed("well", batches(1, [3] * 3)))


def test_weights_that_a_step_made_no_numbers_of_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device tells of them by a NaN for the norm, while loss and gradient were sound: the reason
    does not speak of gradients alone, and says what is usually wrong."""
    engine, sick = tiny_engine(), Fed("sick", batches(1, [3] * 2))
    monkeypatch.setattr(optimiser, "step_jobs", lambda rows, due: torch.tensor([torch.nan]))
    train(engine, [sick])
    assert sick.failure is not None
    reason = "gradients or weights are no longer finite numbers at step 1 (rows "
    assert sick.failure.message.startswith(reason)
    assert "the usual cause is the learning rate" in sick.failure.message


def test_an_adapter_that_holds_no_numbers_is_refused(engine: Engine) -> None:
    """By the name of its job, which leaves nothing behind; a neighbour trains as alone."""
    well, sick = Fed("well", batches(1, [3] * 3)), Fed("sick", [])
    well.attach(engine)
    broken = engine.super_model.new_adapter(sick.spec)
    list(broken.values())[-1].b[0, 0] = float("nan")
    with pytest.raises(JobFailed, match=r"job 'sick': its adapter holds weights on .*down_proj"):
        sick.attach(engine, weights=broken)
    assert engine.jobs == ["well"]
    engine.check_integrity()
    list(drive(engine, [well]))
    assert as_alone(engine, well, lambda: Fed("well", batches(1, [3] * 3)))


def test_the_reason_names_the_rows_that_are_sick() -> None:
    """Of a large batch only the rows whose own loss is no number are named, and not too many."""
    engine = tiny_engine(budget_tokens=512)
    poison_token(engine)
    ill = [sequence([RARE, 3, 4], origin=f"f:{i}") for i in range(9)]
    sick = Fed("sick", [[*sequences(1, 20), *ill]])
    train(engine, [sick])
    assert "(rows f:0, f:1, f:2, f:3, f:4 and 4 more)" in str(sick.failure)


def test_padding_reaches_nobody(engine: Engine) -> None:
    """Rows that only fill a bucket belong to no job: a NaN in them changes no number."""

    def made() -> Fed:
        return Fed("job", batches(1, [3] * 3, longest=9), dropout=0.1)

    solo, expected = alone(made)
    engine.super_model.model.get_input_embeddings().weight.data[0] = float("nan")
    job = made()
    outcomes = train(engine, [job])
    assert any(outcome.rows > sum(outcome.tokens.values()) for outcome in outcomes)
    assert job.losses == solo.losses
    assert identical(weights(engine, job), expected)
