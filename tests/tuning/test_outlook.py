"""What is left of a sweep, before and while it runs."""

import pytest

from tlora.core.sweep import EarlyExitSpec, ObjectiveSpec
from tlora.tuning.events import Added, Closed, Evaluated, TrialPlan
from tlora.tuning.exits import rule_of
from tlora.tuning.outlook import expected_share, phases_left, survivors_of
from tlora.tuning.study import StudyState

SECONDS = {f"t-{at}": 10.0 + at for at in range(8)}


def study(exits: EarlyExitSpec) -> StudyState:
    state = StudyState(rule_of(exits, ObjectiveSpec()), ObjectiveSpec())
    plans = [
        TrialPlan(
            name=name, params={}, total_steps=20, total_tokens=200, batch_size=1, adapter_bytes=1.0
        )
        for name in SECONDS
    ]
    state.on(Added(tuple(plans)))
    state.on(Closed())
    return state


def tell(state: StudyState, name: str, step: int, loss: float) -> None:
    metrics = {"eval_loss": loss, "loss": loss}
    state.on(Evaluated(trial=name, step=step, tokens=10 * step, metrics=metrics))


def test_a_warm_up_of_all_and_then_as_many_as_are_kept():
    """A tenth of each, then a quarter of the trials with the mean of what is left."""
    exits = EarlyExitSpec(warmup=0.1, keep=0.25)
    first, second = phases_left(study(exits), exits, SECONDS)
    assert first == pytest.approx([each / 10 for each in SECONDS.values()])
    assert second == pytest.approx([0.9 * sum(SECONDS.values()) / 8] * 2)
    assert survivors_of(study(exits), exits) == 2


def test_what_has_been_trained_is_no_longer_left():
    """Of trials that have warmed up, nothing of the warm-up; when all have, the rest of those that
    were chosen, by name."""
    exits = EarlyExitSpec(warmup=0.1, keep=0.25)
    state = study(exits)
    for at, name in enumerate(SECONDS):
        assert len(phases_left(state, exits, SECONDS)[0]) == 8 - at
        tell(state, name, 2, loss=3.0 + at)
    (left,) = phases_left(state, exits, SECONDS)
    assert left == pytest.approx([0.9 * SECONDS["t-0"], 0.9 * SECONDS["t-1"]])
    tell(state, "t-0", 10, loss=2.0)
    (left,) = phases_left(state, exits, SECONDS)
    assert left[0] == pytest.approx(0.5 * SECONDS["t-0"])


def test_other_rules_and_trials_that_are_to_come():
    """Without early exit all of it; of asha's rungs the mean, by hand for 5 % and 4: 0.05 + 0.15/4
    + 0.6/16 + 0.2/64; trials of a sampler count before they are named."""
    none = EarlyExitSpec(method="none")
    (left,) = phases_left(study(none), none, SECONDS)
    assert left == pytest.approx(list(SECONDS.values()))
    asha = EarlyExitSpec(method="asha")
    assert expected_share(asha) == pytest.approx(0.05 + 0.15 / 4 + 0.6 / 16 + 0.2 / 64)
    assert survivors_of(study(asha), asha) == 1
    (left,) = phases_left(study(none), none, SECONDS, coming=2, mean=7.0)
    assert left[8:] == (7.0, 7.0)
