"""What a group costs under any plan: seconds, bytes on a GPU, bytes over links, and what waits.

The round of groups.py, carried to ranks that shard the base and to adapters that live on one rank.
All ranks move in lock-step: the fullest sets the time, and one without work joins with an empty
nano-batch. For a plan of replicas with data-parallel adapters the seconds are those of groups.py,
but for the control element and for how gradients are summed.

Who works on what is in deck.py, what waits in plan_links.py, and what lies where in plan_memory.py.
Tensor and pipeline parallel plans are priced by arithmetic alone, and nothing runs them yet.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tlora.core.errors import SpecError
from tlora.core.plan import Plan
from tlora.core.request import JobRequest
from tlora.costs.deck import Deck, RankWork, placement_of
from tlora.costs.groups import Costs
from tlora.costs.layout import NAMED, BaseLayout, gathers_of
from tlora.costs.plan_links import Links
from tlora.costs.plan_memory import MemoryParts, memory_of
from tlora.costs.rounds import BaseCosts


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPrice:
    """Of jobs trained together under a plan, in the order asked for."""

    plan: Plan
    round_s: float
    """A nano-batch on every rank (with pp: as many as are in flight), and the steps after it."""

    tokens: tuple[float, ...]
    """Of each job in a round."""

    steps_per_s: tuple[float, ...]
    worth: float
    compute_s: float
    """Forward, backward and steps on the fullest rank."""

    waiting_s: float
    """On links, where nothing hides it: gathers, rows between stages, the control element."""

    sum_s: float
    """Of adapters' gradients over ranks."""

    idle_share: float
    """Of the ranks' time, what they wait for the fullest one."""

    empty_ranks: int
    """Without a job."""

    gather_calls: int
    """All-gathers of a rank in a round."""

    gather_bytes: float
    """What these leave on a rank."""

    sum_bytes: float
    """Gradients of jobs that span ranks: what summing them brings to a rank in a round."""

    memory: MemoryParts
    usable_bytes: float | None
    """Of a GPU, with the margin; None where nobody says."""

    placement: tuple[int | None, ...]
    """The rank of each job; None for one that spans all."""

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / self.round_s

    @property
    def communication_share(self) -> float:
        """Of a round."""
        return (self.waiting_s + self.sum_s) / self.round_s

    @property
    def fits(self) -> bool:
        """True where memory is not known."""
        total = self.memory.total
        return total is None or self.usable_bytes is None or total <= self.usable_bytes


def price_plan(
    costs: Costs,
    requests: Sequence[JobRequest],
    weights: Sequence[float],
    plan: Plan,
    *,
    layout: BaseLayout | None = None,
    gpus: Sequence[int] | None = None,
) -> PlanPrice:
    """On these GPUs, or the first ones of the cluster; the layout is the one given, or the named
    one that the profile is of. Raises SpecError for a plan that cannot be priced: a sharded base
    whose layout is not known, more layers kept than there are."""
    layout = layout or NAMED.get(costs.profile(requests[0].base).shape)
    chosen = tuple(range(plan.gpus)) if gpus is None else tuple(gpus)
    _check(plan, layout, chosen, len(costs.cluster))
    base = costs.base(requests[0].base)
    figures = [costs.figures(request) for request in requests]
    placement = placement_of(requests, plan)
    deck = Deck(figures, weights, placement, plan)
    ranks = [deck.rank(kind.local) for kind in deck.kinds]
    links = Links(costs, layout, plan, chosen)

    passes = [_nano_batch(base, rank, plan) for rank in ranks]
    steps = [_steps_s(base, rank) for rank in ranks]
    fullest = max(each.seconds for each in passes)
    rows = max(each.rows for each in passes)
    nano_batches = max(each.nano_batches for each in passes)
    together = max(one.seconds + step for one, step in zip(passes, steps, strict=True))
    if plan.fsdp > 1:
        # Layer by layer all go through forward and backward together, and step after that.
        together = fullest + max(steps)
    waiting_s = nano_batches * links.waiting_s(fullest / nano_batches, rows)
    sum_s = links.sum_s(deck.spread_work)
    round_s = together + waiting_s + sum_s
    usual = [deck.rank(kind.local, of_the_fullest=False) for kind in deck.kinds]
    busy = sum(
        kind.count * (_nano_batch(base, rank, plan).seconds + step)
        for kind, rank, step in zip(deck.kinds, usual, steps, strict=True)
    )

    tokens = deck.tokens
    steps_per_s = tuple(
        many / each.batch_tokens / round_s for many, each in zip(tokens, figures, strict=True)
    )
    gathers = None if layout is None else gathers_of(layout, plan.fsdp, plan.kept_layers)
    held = [each.parameters for each in ranks]
    return PlanPrice(
        plan=plan,
        round_s=round_s,
        tokens=tuple(tokens),
        steps_per_s=steps_per_s,
        worth=sum(
            request.gpus * rate * each.solo_step_s
            for request, rate, each in zip(requests, steps_per_s, figures, strict=True)
        ),
        compute_s=together,
        waiting_s=waiting_s,
        sum_s=sum_s,
        idle_share=max(0.0, (together * plan.ranks - busy) / (plan.ranks * round_s)),
        empty_ranks=deck.empty_ranks,
        gather_calls=0 if gathers is None else gathers.calls * nano_batches,
        gather_bytes=0.0 if gathers is None else gathers.moved_bytes * nano_batches / plan.tp,
        sum_bytes=links.sum_bytes(deck.spread_work.parameters),
        memory=memory_of(
            base,
            layout,
            plan,
            rows=rows,
            longest=max(deck.longest),
            parameters=max(held),
            largest_spread=deck.largest_spread,
        ),
        usable_bytes=base.usable_bytes,
        placement=tuple(placement),
    )


@dataclass(frozen=True, slots=True)
class _Pass:
    seconds: float
    """Of all nano-batches in flight, on one rank."""

    rows: float
    """Of one."""

    nano_batches: int


def _nano_batch(base: BaseCosts, rank: RankWork, plan: Plan) -> _Pass:
    """Forward and backward. tp divides the products, but not what every launch costs. A pipeline
    takes a nano-batch per stage's time while its stages are all fed, and its whole length
    otherwise: with jobs enough nobody flushes it."""
    tokens = rank.work.tokens
    if not tokens:
        return _Pass(0.0, 0.0, 1)
    count = min(plan.pp, max(1, math.ceil(tokens / plan.bucket - 1e-9)))
    rows = base.rows(tokens / count, plan.bucket)
    time = base.time
    beside_s = (time.square_s * rank.work.squares + rank.work.lora_s) / count
    flat, work = time.flat_s, (time.row_s * rows + beside_s) / plan.tp
    large, small = max(flat, work), min(flat, work)
    if small > 0:
        large *= (1 + (small / large) ** time.sharpness) ** (1 / time.sharpness)
    seconds = time.fixed_s + time.segment_s * rank.segments + large
    return _Pass(seconds * max(count, plan.pp) / plan.pp, rows, count)


def _steps_s(base: BaseCosts, rank: RankWork) -> float:
    return min(1.0, rank.work.steps) * base.pass_s + rank.work.step_s


def _check(plan: Plan, layout: BaseLayout | None, gpus: tuple[int, ...], most: int) -> None:
    if len(gpus) != plan.gpus or len(gpus) > most:
        raise SpecError(f"{plan} needs {plan.gpus} GPUs, got {min(len(gpus), most)}", field="plan")
    if not plan.is_replicated_only and layout is None:
        raise SpecError(
            "the layout of the base is not known, so only replicas can be priced", field="plan"
        )
    if layout is not None and plan.kept_layers > len(layout.layers):
        raise SpecError(
            f"is {plan.kept_layers}, and {layout.name} has {len(layout.layers)} layers",
            field="plan.kept_layers",
        )
