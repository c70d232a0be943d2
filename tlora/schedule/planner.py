"""The plan of one group: every way to lay it over so many GPUs, what each would give, which is
best, and why the others are not.

Pure: prices come from costs/plans.py, and the same question has the same answer. Of the plans that
fit and can be run, the one that has all jobs done soonest is chosen; of those that are alike, the
one that talks less and leaves jobs where they are.

Tokens per second with all jobs running do not tell alone: a large job on one rank keeps that rank
as busy as small ones keep theirs, and is done much later.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tlora.core.plan import Placement, Plan
from tlora.core.records import as_json
from tlora.core.request import JobRequest
from tlora.core.wording import number_of
from tlora.costs.groups import Costs
from tlora.costs.layout import NAMED, BaseLayout
from tlora.costs.plans import PlanPrice, price_plan

ALIKE = 0.005
"""Plans that differ by less in tokens per second are alike: no profile is better than that."""

WORTH_KEEPING = 0.01
"""Of a round, spent waiting for weights: above it, free memory is used to keep layers gathered."""

ORDER: tuple[Placement, ...] = ("rank_local", "mixed", "data_parallel")
"""Of plans that are alike."""

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Candidate:
    price: PlanPrice
    run_tokens_per_s: float
    """Tokens of all jobs, over the seconds until the last is done: what plans are ordered by."""

    is_best: bool
    why: str
    """Why it was chosen, or what it loses."""

    @property
    def plan(self) -> Plan:
        return self.price.plan


@dataclass(frozen=True, slots=True)
class PlanChoice:
    world: int
    best: PlanPrice | None
    """None where nothing fits."""

    candidates: tuple[Candidate, ...]
    """One for each way to lay the group out, with the nano-batches that suit it best; the best
    first, then those that fit, then the others."""

    @property
    def sentence(self) -> str:
        if self.best is not None:
            return f"Best on {number_of(self.world, 'GPU')}: {self.best.plan}."
        least = min((each.price for each in self.candidates), key=least_memory)
        return (
            f"Nothing fits on {number_of(self.world, 'GPU')}. The least is {least.plan}, which "
            f"{memory_text(least)}."
        )


def choice_as_json(choice: PlanChoice) -> dict[str, Any]:
    return {
        "gpus": choice.world,
        "best": None if choice.best is None else as_json(choice.best.plan),
        "sentence": choice.sentence,
        "candidates": [_candidate_as_json(each) for each in choice.candidates],
    }


def _candidate_as_json(candidate: Candidate) -> dict[str, Any]:
    price = candidate.price
    figures = as_json(price)
    # These grow with the jobs, and follow from the plan.
    for name in ("tokens", "steps_per_s", "placement", "worth"):
        del figures[name]
    return figures | {
        "tokens_per_s": price.tokens_per_s,
        "run_tokens_per_s": candidate.run_tokens_per_s,
        "communication_share": price.communication_share,
        "memory_bytes": price.memory.total,
        "fits": price.fits,
        "is_executed": price.plan.is_executed,
        "is_best": candidate.is_best,
        "why": candidate.why,
    }


class Planner:
    """For these jobs on this cluster."""

    def __init__(
        self,
        costs: Costs,
        requests: Sequence[JobRequest],
        *,
        layout: BaseLayout | None = None,
        weights: Sequence[float] | None = None,
        exact: bool = False,
        whole: bool = False,
    ) -> None:
        """`exact`: bits count. No job may span ranks, for a sum over them has bits of its own, and
        no base be in shards, where nothing shows them. `whole`: no base may be in shards."""
        self.costs = costs
        self.requests = tuple(requests)
        self.layout = layout or NAMED.get(costs.profile(requests[0].base).shape)
        self.weights = tuple(weights or (request.load.weight for request in requests))
        self.exact = exact
        self.whole = whole or exact

    def price(self, plan: Plan, gpus: Sequence[int] | None = None) -> PlanPrice:
        return price_plan(
            self.costs, self.requests, self.weights, plan, layout=self.layout, gpus=gpus
        )

    def choose(
        self,
        world: int,
        *,
        gpus: Sequence[int] | None = None,
        on_paper: bool = False,
        bucket: int | None = None,
        use_all: bool = False,
    ) -> PlanChoice:
        """`on_paper` adds what is priced and never chosen: tensor and pipeline parallel plans.
        `bucket` holds the size of nano-batches; otherwise every size is tried. Where shards wait
        for weights and memory is free, layers stay gathered. `use_all`: ranks that were started
        cannot be left out."""
        found = [
            self._best_size(shape, bucket, gpus) for shape in self._shapes(world, on_paper=on_paper)
        ]
        found += [other for price in found if (other := self._keeping(price, gpus)) is not None]
        able = [
            price
            for price in found
            if price.fits and price.plan.is_executed and (price.plan.gpus == world or not use_all)
        ]
        best = None
        if able:
            most = max(map(self.run_tokens_per_s, able))
            alike = [price for price in able if self.run_tokens_per_s(price) >= most * (1 - ALIKE)]
            best = min(alike, key=_preference)
        return PlanChoice(
            world,
            best,
            tuple(
                Candidate(
                    price,
                    self.run_tokens_per_s(price),
                    price is best,
                    self._why(price, best, world, found),
                )
                for price in sorted(found, key=lambda price: self._order(price, best))
            ),
        )

    def run_tokens_per_s(self, price: PlanPrice) -> float:
        return self._total_tokens / self.all_done_s(price)

    def all_done_s(self, price: PlanPrice) -> float:
        """If ranks stay as full as they are, jobs that are left behind moving up, but for a job
        that takes longer by itself: it has a step in a round at most, and one that lives on a rank
        no more tokens in it than that rank."""
        ends_s = self._total_tokens / price.tokens_per_s
        for request, rank in zip(self.requests, price.placement, strict=True):
            room = price.plan.bucket * price.plan.pp * (price.plan.ranks if rank is None else 1)
            rounds = max(1.0, request.load.batch_tokens / room)
            ends_s = max(ends_s, request.total_steps * rounds * price.round_s)
        return ends_s

    @property
    def may_shard(self) -> bool:
        return self.layout is not None and not self.whole

    def sizes(self) -> list[int]:
        """Of nano-batches."""
        return self.costs.base(self.requests[0].base).buckets

    def _best_size(self, shape: Plan, bucket: int | None, gpus: Sequence[int] | None) -> PlanPrice:
        """The fastest size that fits; where none does, the one that needs least."""
        chosen = None if gpus is None else gpus[: shape.gpus]
        prices = [
            self.price(replace(shape, bucket=size), chosen)
            for size in ([bucket] if bucket is not None else self.sizes())
        ]
        fitting = [price for price in prices if price.fits]
        if not fitting:
            return min(prices, key=least_memory)
        return max(fitting, key=self.run_tokens_per_s)

    def _keeping(self, price: PlanPrice, gpus: Sequence[int] | None) -> PlanPrice | None:
        """The same with as many layers kept gathered as there is room for, if that is faster."""
        kept = self._kept_layers(price) if price.fits else 0
        if not kept:
            return None
        chosen = None if gpus is None else gpus[: price.plan.gpus]
        other = self.price(replace(price.plan, kept_layers=kept), chosen)
        gains = other.fits and other.tokens_per_s > price.tokens_per_s * (1 + ALIKE)
        return other if gains else None

    def _kept_layers(self, price: PlanPrice) -> int:
        """How many free memory holds, where weights are waited for."""
        total, usable = price.memory.total, price.usable_bytes
        if self.layout is None or price.plan.fsdp == 1 or total is None or usable is None:
            return 0
        if price.waiting_s < WORTH_KEEPING * price.round_s:
            return 0
        plan, layers = price.plan, self.layout.layers
        layer = max(self.layout.gathered_bytes(each, plan.fsdp) for each in layers)
        return min(len(layers), int((usable - total) / (layer / plan.tp / plan.pp)))

    def _shapes(self, world: int, *, on_paper: bool) -> Iterator[Plan]:
        """Every way to use `world` GPUs, and those with fewer ranks where jobs or sequences are
        too few for all. The bucket is not chosen yet."""
        seen: set[Plan] = set()
        for shared in _counts(world) if self.may_shard else [1]:
            for tp, pp in self._inner(shared) if on_paper else [(1, 1)]:
                fsdp = shared // (tp * pp)
                for replicas in self._replicas(world // shared, fsdp):
                    for adapters, spread in self._placements(replicas * fsdp):
                        plan = Plan(
                            bucket=1,
                            replicas=replicas,
                            fsdp=fsdp,
                            tp=tp,
                            pp=pp,
                            adapters=adapters,
                            spread=spread,
                        )
                        if plan not in seen:
                            seen.add(plan)
                            yield plan

    def _inner(self, shared: int) -> Iterator[tuple[int, int]]:
        """Of the GPUs that share a copy: all fsdp, all tp within a node, all pp, or tp within a
        node and pp between them."""
        assert self.layout is not None
        node = max(len(node.gpus) for node in self.costs.cluster.nodes)
        yield 1, 1
        if 1 < shared <= node:
            yield shared, 1
        if 1 < shared <= len(self.layout.layers):
            yield 1, shared
        if shared > node and shared % node == 0:
            yield node, shared // node

    def _replicas(self, most: int, fsdp: int) -> list[int]:
        """All there is room for; no more ranks than jobs; no more than sequences."""
        jobs = len(self.requests)
        sequences = sum(request.load.batch_size for request in self.requests)
        return sorted({max(1, min(most, each // fsdp)) for each in (most * fsdp, jobs, sequences)})

    def _placements(self, ranks: int) -> Iterator[tuple[Placement, tuple[str, ...]]]:
        """Jobs that have more work than a rank's even part are those to spread."""
        if ranks == 1 or not self.exact:
            yield "data_parallel", ()
        if ranks == 1:
            return
        yield "rank_local", ()
        if self.exact:
            return
        even = sum(self._work.values()) / ranks
        spread = tuple(name for name, work in self._work.items() if work > even)
        if 0 < len(spread) < len(self.requests):
            yield "mixed", spread

    def _order(self, price: PlanPrice, best: PlanPrice | None) -> tuple[bool, bool, float, float]:
        speed = -self.run_tokens_per_s(price) if price.fits else 0.0
        return price is not best, not price.fits, speed, least_memory(price)

    def _why(
        self, price: PlanPrice, best: PlanPrice | None, world: int, others: Sequence[PlanPrice]
    ) -> str:
        if not price.fits:
            return memory_text(price)
        if best is None:
            return not_executed(price.plan)
        if price is best:
            return _strength(price, others)
        said = f"{self.run_tokens_per_s(price) / self.run_tokens_per_s(best):.2f} of the best"
        if not price.plan.is_executed:
            return f"{said}; {not_executed(price.plan)}"
        return f"{said}: {self._loss(price, best, world)}"

    def _loss(self, price: PlanPrice, best: PlanPrice, world: int) -> str:
        """Where its GPUs' time goes that the best plan's does not, by what weighs most."""
        mine, theirs = self._spent(price, world), self._spent(best, world)
        name = max(mine, key=lambda each: mine[each] - theirs[each])
        if mine[name] - theirs[name] < ALIKE * sum(theirs.values()):
            return "as fast; moves or holds more"
        return _loss_text(name, price, best, world)

    def _spent(self, price: PlanPrice, world: int) -> dict[str, float]:
        """Seconds of a GPU for each token of the run, by what they go to."""
        each = price.plan.gpus / price.tokens_per_s
        spent = {
            "unused": (world / price.plan.gpus - 1) * each,
            "idle": price.idle_share * each,
            "links": price.waiting_s / price.round_s * each,
            "sums": price.sum_s / price.round_s * each,
        }
        spent["computing"] = world / price.plan.gpus * each - sum(spent.values())
        spent["end"] = world / self.run_tokens_per_s(price) - sum(spent.values())
        return spent

    @cached_property
    def _total_tokens(self) -> float:
        return sum(request.total_tokens for request in self.requests)

    @cached_property
    def _work(self) -> dict[str, float]:
        return {each.name: self.costs.figures(each).least_s for each in self.requests}


def least_memory(price: PlanPrice) -> float:
    return price.memory.total or 0.0


def memory_text(price: PlanPrice) -> str:
    """What it needs of what there is, with the parts."""
    memory, usable = price.memory, price.usable_bytes
    if memory.total is None or usable is None:
        return "takes memory that is not known"
    parts = [("base", memory.weights), ("gathered layers", memory.gathered)]
    parts += [("adapters", memory.adapters), ("sums of gradients", memory.sums)]
    parts += [("activations", memory.activations or 0.0)]
    unit, name = (GIB, "GiB") if memory.total >= GIB else (GIB / 1024, "MiB")
    listed = ", ".join(f"{part} {size / unit:.1f}" for part, size in parts if size >= unit / 20)
    return f"needs {memory.total / unit:.1f} {name} of {usable / unit:.1f} on a GPU ({listed})"


def _counts(world: int) -> list[int]:
    """Divisors and powers of two."""
    found = {count for count in range(1, world + 1) if world % count == 0}
    return sorted(found | {1 << power for power in range(world.bit_length())})


def _preference(price: PlanPrice) -> tuple[int, float, int, int]:
    plan = price.plan
    return plan.fsdp, round(price.communication_share, 3), plan.gpus, ORDER.index(plan.adapters)


def not_executed(plan: Plan) -> str:
    names = [name for name, count in (("tp", plan.tp), ("pp", plan.pp)) if count > 1]
    return f"{' and '.join(names)}: priced, not executed yet"


def _strength(best: PlanPrice, others: Sequence[PlanPrice]) -> str:
    faster = [
        price
        for price in others
        if price.tokens_per_s > best.tokens_per_s * (1 + ALIKE) and not price.fits
    ]
    if faster:
        return "the fastest that fits"
    return "the fastest" if len(others) > 1 else "the only one"


def _loss_text(name: str, price: PlanPrice, best: PlanPrice, world: int) -> str:
    plan = price.plan
    match name:
        case "unused":
            return f"leaves {world - plan.gpus} of {number_of(world, 'GPU')} unused"
        case "idle" if price.empty_ranks:
            return f"{price.empty_ranks} of {plan.ranks} ranks have nothing to train"
        case "idle":
            return f"ranks wait {price.idle_share:.0%} of the time for the fullest"
        case "links":
            return f"waits for links {price.waiting_s / price.round_s:.0%} of the time"
        case "sums":
            return f"sums adapters' gradients {price.sum_s / price.round_s:.0%} of the time"
        case "end":
            return "its largest job is done long after the others"
        case _ if plan.bucket < best.plan.bucket:
            return f"its nano-batches are smaller, of {plan.bucket} tokens"
        case _ if plan.adapters != "rank_local" and best.plan.adapters == "rank_local":
            return "every rank steps every job that spans it"
        case _:
            return "its nano-batches are less full"
