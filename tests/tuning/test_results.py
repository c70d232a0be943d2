"""What came of a sweep, counted by hand."""

from tlora.core.sweep import EarlyExitSpec, ObjectiveSpec
from tlora.tuning.events import Added, Closed, Evaluated, Failed, Spent, Stopped, TrialPlan
from tlora.tuning.exits import rule_of
from tlora.tuning.results import tokens_full, tokens_given_up
from tlora.tuning.study import StudyState


def test_tokens_are_given_up_by_rules_alone() -> None:
    """Five trials of 100 tokens each: one diverges at its third evaluation, with 30; one fails, one
    is stopped, and two are left when the budget is spent."""
    state = StudyState(rule_of(EarlyExitSpec(warmup=1.0), ObjectiveSpec()), ObjectiveSpec())
    plans = [
        TrialPlan(
            name=name, params={}, total_steps=10, total_tokens=100, batch_size=1, adapter_bytes=1.0
        )
        for name in ("diverges", "fails", "stopped", "late", "later")
    ]
    state.on(Added(tuple(plans)))
    state.on(Closed())
    for step in (1, 2, 3):
        metrics = {"loss": float(step), "eval_loss": float(step)}
        state.on(Evaluated(trial="diverges", step=step, tokens=10 * step, metrics=metrics))
    state.on(Failed(trial="fails", step=2, tokens=20, reason="the loss is nan"))
    state.on(Stopped("stopped"))
    state.on(Spent("seconds", 2.0, 1.0))
    assert [each.verdict and each.verdict.rule for each in state.trials.values()] == [
        "diverging",
        None,
        "person",
        "budget",
        "budget",
    ]
    assert (tokens_given_up(state), tokens_full(state), state.tokens_spent) == (70, 500, 50)
