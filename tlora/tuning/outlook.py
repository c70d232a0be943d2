"""What is left of a sweep, as far as can be said before it is run: for planning, not for deciding.

Who survives is not known, how many do is: as many trials as the rule keeps go on, each as long as
the mean of all. Trials that diverge or overfit end sooner than this says.
"""

import math
from collections.abc import Mapping

from tlora.core.sweep import EarlyExitSpec
from tlora.tuning.exits import num_kept
from tlora.tuning.study import StudyState, Trial


def phases_left(
    state: StudyState,
    exits: EarlyExitSpec,
    seconds: Mapping[str, float],
    *,
    coming: int = 0,
    mean: float = 0.0,
) -> tuple[tuple[float, ...], ...]:
    """Seconds left of the trials that can train at once, and of those that will after them.
    `seconds`: of each whole trial; `coming`: trials that a sampler has not named yet, of `mean`
    seconds each."""
    live = [trial for trial in state.trials.values() if trial.live]
    warmup = state.rule.warmup
    if warmup is None or state.selected:
        until = expected_share(exits)
        left = [_left(trial, until, seconds) for trial in live]
        return _without_empty((*left, *[mean * until] * coming))
    through = [trial for trial in live if trial.kept or trial.plan.parent is not None]
    cohort = [trial for trial in live if trial not in through]
    warm = {each.name: state.warmup_steps(each.plan) / each.plan.total_steps for each in cohort}
    first = [_left(trial, warm[trial.name], seconds) for trial in cohort if not trial.warmed]
    first += [_left(trial, 1.0, seconds) for trial in through] + [mean * warmup] * coming
    survivors = min(survivors_of(state, exits, coming), len(cohort) + coming)
    rest = [(1 - max(warm[each.name], _share(each))) * seconds[each.name] for each in cohort]
    rest += [(1 - warmup) * mean] * coming
    each = sum(rest) / max(1, len(rest))
    return _without_empty(tuple(first), (each,) * survivors)


def survivors_of(state: StudyState, exits: EarlyExitSpec, coming: int = 0) -> int:
    """So many trials make all their steps, if none fails."""
    own = sum(trial.plan.parent is None for trial in state.trials.values()) + coming
    match exits.method:
        case "alto":
            return num_kept(exits, own)
        case "asha":
            rungs = math.ceil(math.log(1 / exits.first_rung, exits.reduction) - 1e-9)
            return math.ceil(own / exits.reduction**rungs)
        case _:
            return own


def expected_share(exits: EarlyExitSpec) -> float:
    """Of its steps that a trial makes in the mean, where there is no warm-up of all. That of median
    stopping depends on the trials, and is taken to be all of them."""
    if exits.method != "asha":
        return 1.0
    share = rung = exits.first_rung
    reached = 1.0
    while rung < 1:
        reached /= exits.reduction
        further = min(1.0, rung * exits.reduction)
        share += reached * (further - rung)
        rung = further
    return share


def _left(trial: Trial, until: float, seconds: Mapping[str, float]) -> float:
    """One that is further than expected goes to its end."""
    share = _share(trial)
    return ((until if share < until else 1.0) - share) * seconds[trial.name]


def _share(trial: Trial) -> float:
    return min(1.0, trial.step / trial.plan.total_steps)


def _without_empty(*phases: tuple[float, ...]) -> tuple[tuple[float, ...], ...]:
    return tuple(phase for phase in phases if phase)
