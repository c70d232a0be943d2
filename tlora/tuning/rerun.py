"""What other rules would have made of a sweep that was run to its end.

A trial's curve does not depend on its company, so the curves of a sweep without early exit hold the
answer for any rule, any thresholds and any number of trials at once.
"""

from collections.abc import Mapping, Sequence

from tlora.tuning.events import (
    Action,
    Added,
    Attach,
    Closed,
    Completed,
    Evaluated,
    Event,
    Failed,
    TrialPlan,
)
from tlora.tuning.study import StudyState


def curves_of(events: Sequence[Event]) -> dict[str, list[Event]]:
    """Every trial's evaluations and its end, in order."""
    found: dict[str, list[Event]] = {}
    for event in events:
        if isinstance(event, Evaluated | Completed | Failed):
            found.setdefault(event.trial, []).append(event)
    return found


def plans_of(events: Sequence[Event]) -> list[TrialPlan]:
    return [plan for event in events if isinstance(event, Added) for plan in event.plans]


def rerun(
    state: StudyState, plans: Sequence[TrialPlan], curves: Mapping[str, Sequence[Event]]
) -> StudyState:
    """Bring a new study through these curves: whoever is attached and has trained the least is
    evaluated next, as on a device that all share alike."""
    at = {plan.name: 0 for plan in plans}
    attached: set[str] = set()

    def do(actions: Sequence[Action]) -> None:
        for action in actions:
            (attached.add if isinstance(action, Attach) else attached.discard)(action.trial)

    def trained(name: str) -> tuple[int, str]:
        return getattr(curves[name][at[name]], "tokens", 0), name

    do(state.on(Added(tuple(plans))))
    do(state.on(Closed()))
    while attached:
        name = min(attached, key=trained)
        event = curves[name][at[name]]
        at[name] += 1
        if not isinstance(event, Evaluated):
            attached.discard(name)
        do(state.on(event))
    return state
