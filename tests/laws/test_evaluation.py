"""A job whose adapter no longer holds numbers fails when evaluated, whatever its loss."""

import math

import pytest
from support.tiny import Fed, sequences, tiny_engine

from tlora.model.routing import Routing
from tlora.training.engine import Engine
from tlora.training.engine_job import EngineJob
from tlora.training.outcome import Outcome

ROWS = sequences(1, 6, shortest=3, longest=9)


@pytest.fixture(autouse=True)
def hiding_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that turns a NaN into zeros, as torch's does on a CPU for queries and keys of fewer
    tokens than a vector register holds."""
    honest = Routing.attention

    def hiding(self, *arguments, **settings):
        out, _ = honest(self, *arguments, **settings)
        return out.nan_to_num(0.0, 0.0, 0.0), None

    monkeypatch.setattr(Routing, "attention", hiding)


def poisoned_engine(matrix: str, value: float) -> Engine:
    """Two jobs, the first of which has a matrix filled with `value` in every layer."""
    engine = tiny_engine()
    for name in ("poisoned", "sound"):
        Fed(name, []).attach(engine)
    views = engine.super_model.views("poisoned")
    for path in [path for path in views if path.endswith(matrix)]:
        views[path].value.fill_(value)
    return engine


def evaluate_both(engine: Engine) -> Outcome:
    for name in ("poisoned", "sound"):
        engine.evaluate(name, ROWS)
    outcome = engine.run_nano_batch()
    engine.check_integrity()
    return outcome


@pytest.mark.parametrize("matrix", ["q_proj.lora_A", "k_proj.lora_B", "v_proj.lora_A"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers_fail_the_evaluation(matrix: str, value: float) -> None:
    """By name and alone: the neighbour in the same nano-batch gets its loss."""
    outcome = evaluate_both(poisoned_engine(matrix, value))
    assert [failure.job for failure in outcome.failures] == ["poisoned"]
    assert [done.job for done in outcome.evaluations] == ["sound"]
    assert math.isfinite(outcome.evaluations[0].loss)


def test_without_the_check_the_loss_would_look_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the loss is not enough: attention hides the NaN, and a finite loss is reported."""
    monkeypatch.setattr(EngineJob, "check_weights", lambda self, finite: None)
    outcome = evaluate_both(poisoned_engine("q_proj.lora_A", math.nan))
    assert [done.job for done in outcome.evaluations] == ["poisoned", "sound"]
    assert all(math.isfinite(done.loss) for done in outcome.evaluations)


def test_the_reason_says_what_is_wrong() -> None:
    """The weights and the step, not the loss."""
    outcome = evaluate_both(poisoned_engine("q_proj.lora_A", math.nan))
    assert "holds weights that are not finite numbers after step 0" in str(outcome.failures[0])
