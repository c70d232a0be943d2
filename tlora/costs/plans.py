"""What a group costs under any plan: seconds, bytes on a GPU, bytes over links, and what waits.

The round of groups.py, carried to ranks that shard the base and to adapters that live on one rank.
All ranks move in lock-step: the fullest sets the time, and one without work joins with an empty
nano-batch. For a plan of replicas with data-parallel adapters the seconds are those of groups.py,
but for the control element and for how gradients are summed.

A sharded base is gathered layer by layer, a layer ahead of the one at work, so that per layer the
longer of computing and gathering counts (their sum where a link does not overlap with work); the
first layer of each direction is waited for, and so are embeddings and head. A job that spans ranks
has its gradients summed in order, a part on each rank, and the sums gathered. Tensor and pipeline
parallel plans are priced by arithmetic alone, and nothing runs them yet.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tlora.core.dealing import deal_jobs, load_of
from tlora.core.errors import SpecError
from tlora.core.plan import Plan
from tlora.core.request import JobRequest
from tlora.costs.collectives import exchange_s, gather_s
from tlora.costs.groups import Costs, JobFigures, segments_of
from tlora.costs.layout import NAMED, BaseLayout, around, gathers_of
from tlora.costs.memory import BYTES_PER_ADAPTER_PARAMETER
from tlora.costs.rounds import NO_WORK, BaseCosts, RoundWork, fullest_part, shared_tokens

CONTROLS = 1
"""Control elements of a nano-batch."""

LAYERS_IN_FLIGHT = 3
"""Of a sharded base: one at work, one that arrives, and its copy into separate weights."""

GRADIENT_BYTES = 4

SUMMED_COPIES = 2
"""Of a job's gradients, on a rank while they are summed: its own and what arrives, or what is
gathered and its order as before. A rank's part of the sum comes on top."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryParts:
    """Bytes on the fullest GPU, at the peak. What was not measured is None."""

    weights: float
    """Of the base: all of it, or a shard."""

    gathered: float
    """Layers of a sharded base that are whole for a while, or stay so."""

    adapters: float
    """Of the jobs that the rank holds, with gradients and moments."""

    activations: float | None
    """Of a nano-batch."""

    sums: float
    """Gradients of the largest job that spans ranks, while they are summed."""

    rest: float | None
    """Workspaces, and what measured peaks were above the fit."""

    @property
    def total(self) -> float | None:
        if self.activations is None or self.rest is None:
            return None
        counted = self.weights + self.gathered + self.adapters + self.sums
        return counted + self.activations + self.rest


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
    one that the profile is of. Raises SpecError for a plan that cannot be
    priced: a sharded base whose layout is not known, more layers kept than there are."""
    layout = layout or NAMED.get(costs.profile(requests[0].base).shape)
    chosen = tuple(range(plan.gpus)) if gpus is None else tuple(gpus)
    _check(plan, layout, chosen, len(costs.cluster))
    base = costs.base(requests[0].base)
    figures = [costs.figures(request) for request in requests]
    placement = placement_of(requests, plan)
    deck = _Deck(figures, weights, placement, plan)
    ranks = [deck.rank(rank) for rank in range(plan.ranks)]
    links = _Links(costs, layout, plan, chosen)

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
    usual = [deck.rank(rank, of_the_fullest=False) for rank in range(plan.ranks)]
    busy = sum(_nano_batch(base, rank, plan).seconds for rank in usual) + sum(steps)

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
        memory=_memory(base, layout, plan, rows, max(deck.longest), max(held), deck.largest_spread),
        usable_bytes=base.usable_bytes,
        placement=tuple(placement),
    )


def placement_of(requests: Sequence[JobRequest], plan: Plan) -> list[int | None]:
    """The rank of each job as a group deals them, None for those that span all."""
    local = [each for each in requests if not _spans_ranks(each.name, plan)]
    places = deal_jobs([load_of(each) for each in local], plan.ranks)
    return [places.get(each.name) for each in requests]


@dataclass(frozen=True, slots=True)
class _Rank:
    work: RoundWork
    """Of a round, on this rank."""

    segments: float
    parameters: float
    """Of the adapters that it holds."""


class _Deck:
    """A round's tokens, dealt to ranks. A job that spans ranks competes on each with a part of its
    batch and of its weight."""

    def __init__(
        self,
        figures: Sequence[JobFigures],
        weights: Sequence[float],
        placement: Sequence[int | None],
        plan: Plan,
    ) -> None:
        self.figures = figures
        self.placement = placement
        self.ranks = plan.ranks
        self.tokens = [0.0] * len(figures)
        self._spread = [job for job, rank in enumerate(placement) if rank is None]
        self._local: list[list[int]] = [[] for _ in range(plan.ranks)]
        for job, rank in enumerate(placement):
            if rank is not None:
                self._local[rank].append(job)
        least = [math.inf] * len(figures)
        for local in self._local if any(self._local) else self._local[:1]:
            jobs = [*local, *self._spread]
            parts = [1 if placement[job] is not None else self.ranks for job in jobs]
            shares = shared_tokens(
                [figures[job].batch_tokens / part for job, part in zip(jobs, parts, strict=True)],
                [weights[job] / part for job, part in zip(jobs, parts, strict=True)],
                plan.bucket * plan.pp,
            )
            for job, part, share in zip(jobs, parts, shares, strict=True):
                least[job] = min(least[job], share * part)
        self.tokens = least
        self.spread_work = self._sum(self._spread)
        self._spread_segments = 0.0
        if self._spread:
            self._spread_segments = segments_of(
                self.spread_work,
                [self.tokens[job] for job in self._spread],
                [figures[job] for job in self._spread],
                self.ranks,
            )

    @property
    def largest_spread(self) -> float:
        """Parameters of the largest adapter that spans ranks."""
        return max((self.figures[job].parameters for job in self._spread), default=0.0)

    @property
    def longest(self) -> list[int]:
        return [each.longest for each in self.figures]

    @property
    def empty_ranks(self) -> int:
        """Sequences of the jobs that span ranks go first to those that have nothing else."""
        without = sum(1 for local in self._local if not local)
        return max(0, without - math.ceil(self.spread_work.sequences - 1e-9))

    def rank(self, rank: int, *, of_the_fullest: bool = True) -> _Rank:
        """Of the jobs that span ranks it has what the fullest has, or what all have on average:
        each round another one may be the fullest."""
        local = self._local[rank]
        work = self._sum(local)
        held = sum(self.figures[job].parameters for job in (*local, *self._spread))
        segments = float(len(local))
        if self._spread:
            shared, part = self.spread_work, 1 / self.ranks
            if of_the_fullest:
                part = fullest_part(shared.sequences, self.ranks)
            work = work.plus(
                # Every rank takes the whole step of such a job.
                shared.times(part)._replace(
                    steps=shared.steps, step_s=shared.step_s, parameters=shared.parameters
                )
            )
            segments += self._spread_segments
        return _Rank(work, segments, held)

    def _sum(self, jobs: Sequence[int]) -> RoundWork:
        work = NO_WORK
        for job in jobs:
            each = self.figures[job]
            work = work.plus(each.whole.times(self.tokens[job] / each.batch_tokens))
        return work


@dataclass(frozen=True, slots=True)
class _Pass:
    seconds: float
    """Of all nano-batches in flight, on one rank."""

    rows: float
    """Of one."""

    nano_batches: int


def _nano_batch(base: BaseCosts, rank: _Rank, plan: Plan) -> _Pass:
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


def _steps_s(base: BaseCosts, rank: _Rank) -> float:
    return min(1.0, rank.work.steps) * base.pass_s + rank.work.step_s


class _Links:
    """What waits for links in a round."""

    def __init__(
        self, costs: Costs, layout: BaseLayout | None, plan: Plan, gpus: tuple[int, ...]
    ) -> None:
        self.cluster, self.layout, self.plan, self.gpus = costs.cluster, layout, plan, gpus
        self.link = self.cluster.link(self.cluster.tier(gpus))

    def waiting_s(self, seconds: float, rows: float) -> float:
        """Of a nano-batch that computes for so long on the fullest rank."""
        if self.link is None:
            return 0.0
        waits = self._gathers_s(seconds) + self._tensor_s(rows) + self._pipeline_s(rows)
        return waits + (CONTROLS * self.link.latency_s if self.plan.ranks > 1 else 0.0)

    def sum_bytes(self, parameters: float) -> float:
        """Its part of everybody's gradients, and the sums of all parts."""
        return 2 * GRADIENT_BYTES * parameters / self.plan.pp if self.plan.ranks > 1 else 0.0

    def sum_s(self, spread: RoundWork) -> float:
        """Each job has two calls of its own."""
        if self.plan.ranks == 1 or not spread.steps or self.link is None:
            return 0.0
        members = self.gpus[:: self.plan.tp]
        moved = self.sum_bytes(spread.parameters) / 2
        once = exchange_s(moved, members, self.cluster) + gather_s(moved, members, self.cluster)
        return once + 2 * (spread.steps - 1) * self.link.latency_s

    def _gathers_s(self, seconds: float) -> float:
        plan, layout = self.plan, self.layout
        if plan.fsdp == 1:
            return 0.0
        assert layout is not None
        # Of a stage: as many as it has, evenly from all.
        again = layout.layers[plan.kept_layers :: plan.pp]
        part = 1 - layout.head_parameters / layout.matmul_parameters
        at_work = seconds * part / 2 / (len(layout.layers) / plan.pp)
        if self.link is not None and not self.link.overlaps:
            at_work = 0.0
        groups = self._groups(plan.tp, plan.fsdp)
        waits = sum(
            self._gather_s(layout.gathered_bytes(unit, plan.fsdp), groups)
            for unit in around(layout)
        )
        found: dict[int, float] = {}
        for place, layer in enumerate(again):
            moved = layout.gathered_bytes(layer, plan.fsdp)
            if moved not in found:
                found[moved] = self._gather_s(moved, groups)
            waits += 2 * (found[moved] if place == 0 else max(0.0, found[moved] - at_work))
        return waits

    def _gather_s(self, moved: float, groups: Sequence[tuple[int, ...]]) -> float:
        return max(gather_s(moved / self.plan.tp, group, self.cluster) for group in groups)

    def _tensor_s(self, rows: float) -> float:
        """Two sums of the rows in each layer and direction, each a scatter and a gather."""
        plan, layout = self.plan, self.layout
        if plan.tp == 1:
            return 0.0
        assert layout is not None
        moved = rows * layout.hidden * layout.itemsize
        groups = self._groups(1, plan.tp)
        one = max(gather_s(moved, group, self.cluster) for group in groups)
        return 4 * 2 * one * len(layout.layers) / plan.pp

    def _pipeline_s(self, rows: float) -> float:
        """Rows to the next stage, and their gradients back."""
        plan, layout = self.plan, self.layout
        if plan.pp == 1:
            return 0.0
        assert layout is not None
        stage = plan.tp * plan.fsdp
        tier = self.cluster.tier(self.gpus[: stage * plan.pp])
        link = self.cluster.link(tier)
        assert link is not None
        moved = rows * layout.hidden * layout.itemsize / plan.tp
        return 2 * (link.latency_s + moved / link.bytes_per_s)

    def _groups(self, stride: int, count: int) -> list[tuple[int, ...]]:
        """Of GPUs that work together, those that differ in how they lie over nodes: the first of
        every block."""
        block = stride * count
        found: dict[tuple[tuple[int, int], ...], tuple[int, ...]] = {}
        for start in range(0, len(self.gpus), block):
            group = self.gpus[start : start + block : stride]
            places = [(self.cluster.gpus[g].rack, self.cluster.gpus[g].node) for g in group]
            first = places[0]
            found.setdefault(tuple((r - first[0], n - first[1]) for r, n in places), group)
        return list(found.values())


def _memory(
    base: BaseCosts,
    layout: BaseLayout | None,
    plan: Plan,
    rows: float,
    longest: int,
    parameters: float,
    largest_spread: float,
) -> MemoryParts:
    """tp shares weights and activations, and half of each adapter; pp shares weights and adapters,
    and has as many nano-batches in flight as stages, so that activations stay."""
    memory = base.profile.memory
    if longest > rows:
        rows = base.rows(float(longest), plan.bucket)
    parts = plan.tp * plan.pp
    weights, gathered = float(memory.weights_bytes), 0.0
    if plan.fsdp > 1:
        assert layout is not None
        weights = layout.shard_bytes(plan.fsdp)
        largest = max(layout.gathered_bytes(layer, plan.fsdp) for layer in layout.layers)
        again = len(layout.layers) - plan.kept_layers
        passing = max(
            min(again, LAYERS_IN_FLIGHT) * largest,
            *(layout.gathered_bytes(unit, plan.fsdp) for unit in around(layout)),
        )
        gathered = (plan.kept_layers / plan.pp * largest + passing) / plan.tp
    known = memory.bytes(rows=0.0, adapter_parameters=0.0) is not None
    row_bytes, fixed, reserve = memory.row_bytes, memory.fixed_bytes, memory.reserve_bytes
    return MemoryParts(
        weights=weights / parts,
        gathered=gathered,
        adapters=BYTES_PER_ADAPTER_PARAMETER * parameters * (1 + 1 / plan.tp) / 2 / plan.pp,
        sums=(SUMMED_COPIES + 1 / plan.ranks) * GRADIENT_BYTES * largest_spread / plan.pp
        if plan.ranks > 1
        else 0.0,
        activations=(row_bytes or 0.0) * rows / plan.tp if known else None,
        rest=(fixed or 0.0) + (reserve or 0.0) if known else None,
    )


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


def _spans_ranks(job: str, plan: Plan) -> bool:
    return plan.adapters == "data_parallel" or (plan.adapters == "mixed" and job in plan.spread)
