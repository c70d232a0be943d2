"""Whether a run over several devices is one group under a plan, or a worker on each device.

Where every job lives on one device and each device has a whole copy of the base, nothing but the
control element would cross ranks: workers carry out the same plan without a lock-step, move jobs as
others end, and go on when one of them dies. A group is for all that workers cannot do: a base in
shards, and jobs that span ranks.
"""

from dataclasses import dataclass

from tlora.core.errors import SpecError
from tlora.core.plan import Plan
from tlora.core.wording import number_of
from tlora.schedule.plan_check import more_gpus
from tlora.schedule.planner import Candidate, PlanChoice, Planner, memory_text

WORTH_A_GROUP = 0.1
"""So much sooner must a group be done: no prediction of plans is better than that
(docs/plans.md)."""


@dataclass(frozen=True, slots=True)
class Way:
    plan: Plan | None
    """Of the group; None for a worker on each device."""

    sentence: str
    """For a person: the plan, what it is predicted to give, and why this one."""


def choose_way(planner: Planner, devices: int) -> Way:
    """Raises SpecError, with the numbers and what would do, if nothing fits."""
    choice = planner.choose(devices)
    if choice.best is None:
        raise nothing_fits(choice, planner)
    best = choice.candidates[0]
    whole = [each for each in choice.candidates if is_apart(each.plan)]
    apart = max(
        (each for each in whole if each.price.fits),
        key=lambda each: each.run_tokens_per_s,
        default=None,
    )
    if apart is None:
        least = min(whole, key=lambda each: each.price.memory.total or 0.0)
        why = f"a whole copy of the base with its jobs {memory_text(least.price)}"
        return Way(best.plan, group_sentence(best, devices, why))
    gain = best.run_tokens_per_s / apart.run_tokens_per_s - 1
    if is_apart(best.plan) or gain < WORTH_A_GROUP:
        return Way(None, workers_sentence(apart, best, gain))
    why = f"{1 + gain:.2f} times what it would be with each job on one device"
    return Way(best.plan, group_sentence(best, devices, why))


def group_plan(planner: Planner, ranks: int, *, use_all: bool = False) -> Way:
    """The fastest of one group. `use_all`: ranks that were started cannot be left out."""
    choice = planner.choose(ranks, use_all=use_all)
    if choice.best is None:
        raise nothing_fits(choice, planner)
    best = choice.candidates[0]
    return Way(best.plan, group_sentence(best, ranks, best.why))


def nothing_fits(choice: PlanChoice, planner: Planner) -> SpecError:
    return SpecError(more_gpus(choice.world, planner), field="--devices")


def is_apart(plan: Plan) -> bool:
    """Whole copies, and no job on more than one of them."""
    return plan.gpus == plan.replicas and (plan.replicas == 1 or plan.adapters == "rank_local")


def workers_sentence(apart: Candidate, best: Candidate, gain: float) -> str:
    said = (
        f"plan: a worker on each device with a whole copy of the base, every job on one of them, "
        f"nothing sent between them: about {apart.run_tokens_per_s:,.0f} tokens/s to the end"
    )
    if is_apart(best.plan):
        return said
    return f"{said}; '{best.plan}' may be {gain:.0%} faster, which no prediction here can tell"


def group_sentence(best: Candidate, devices: int, why: str) -> str:
    plan = best.plan
    unused = devices - plan.gpus
    left = f"; {unused} of {number_of(devices, 'GPU')} stay unused" if unused else ""
    return (
        f"plan: one group, {plan}: about {best.run_tokens_per_s:,.0f} tokens/s to the end, "
        f"{best.price.communication_share:.0%} of the time in communication; {why}{left}"
    )
