"""Whole groups put together, tier by tier: inside a node, then across nodes, then across racks.

Per tier the groups of a base stand in a row, urgent and saturated ones left, roomy ones right. The
leftmost is the seed; those to its right, the roomiest first, are its candidates, and the number of
them to take in is found by binary search, which assumes that the gain rises and then falls. The
neighbours of the cut are looked at too, and `misses` counts how often a scan of all would have
found more. A seed that gains nothing is left to the next tier.
"""

from collections.abc import Callable
from itertools import islice

from tlora.core.cluster import Cluster, Tier
from tlora.core.decision import Reasons
from tlora.schedule.board import Bin, Board
from tlora.schedule.grouping import EPSILON, useful_replicas
from tlora.schedule.pieces import Load, Priced, load_of
from tlora.schedule.tolls import Tolls

LONGEST_PREFIX = 6
TURN_S = 60.0


class Merging:
    def __init__(self, tolls: Tolls, *, audit: bool = False) -> None:
        """`audit` scans all prefixes as well, only to count; it changes nothing."""
        self.tolls = tolls
        self.audit = audit
        self.cuts = 0
        self.misses = 0

    def merge(self, board: Board, movable: set[str], widest: int | None, seeds: int) -> bool:
        """At most so many seeds of one base per tier. Only jobs of `movable` may leave a group."""
        tiers = [Tier.NODE]
        tiers += [Tier.RACK] if len(board.cluster.nodes) > 1 else []
        tiers += [Tier.CLUSTER] if len(board.cluster.racks) > 1 else []
        # The bases take turns, from tick to tick.
        base = board.bases[int(board.state.now // TURN_S) % len(board.bases)]
        helped = False
        row = _row(board, base)
        for tier in tiers:
            if self._merge_tier(board, row, tier, movable, widest, seeds):
                helped, row = True, _row(board, base)
        return helped

    def _merge_tier(
        self,
        board: Board,
        row: list[Bin],
        tier: Tier,
        movable: set[str],
        widest: int | None,
        seeds: int,
    ) -> bool:
        helped = False
        # Every group has its turn as a seed, from tick to tick.
        first = int(board.state.now // TURN_S) * seeds % max(1, len(row))
        for seed in [*row[first:], *row[:first]][:seeds]:
            if seed.name not in board.bins:
                continue
            near = (
                each
                for each in reversed(row)
                if each is not seed
                and each.name in board.bins
                and _is_near(board.cluster, seed.gpus, each.gpus, tier)
                and all(piece.name in movable for piece in each.load.pieces)
            )
            candidates = list(islice(near, LONGEST_PREFIX))
            helped |= self._grow(board, seed, candidates, widest)
        return helped

    def _grow(self, board: Board, seed: Bin, candidates: list[Bin], widest: int | None) -> bool:
        found: dict[int, tuple[float, Load, tuple[int, ...], Priced] | None] = {}

        def merged(count: int) -> float:
            """The gain of taking in so many."""
            if count not in found:
                found[count] = self._merged(board, seed, candidates[:count], widest)
            option = found[count]
            return option[0] if option else float("-inf")

        if not candidates:
            return False
        count = best_cut(merged, len(candidates))
        self.cuts += 1
        if self.audit:
            most = max(merged(each) for each in range(1, len(candidates) + 1))
            self.misses += most > merged(count) + EPSILON and most > EPSILON
        option = found[count]
        if option is None or option[0] <= EPSILON:
            return False
        gain, load, gpus, priced = option
        before = seed.priced.worth + sum(each.priced.worth for each in candidates[:count])
        gone = candidates[:count]
        board.rearrange([*((each, None, (), None) for each in gone), (seed, load, gpus, priced)])
        reasons = Reasons(
            why=f"merged with {', '.join(each.name for each in gone)}",
            before=before,
            after=before + gain,
            slowdown=board.slowest(priced),
            bound_by=priced.bound_by,
        )
        seed.reasons = reasons
        for each in gone:
            for piece in each.load.pieces:
                board.why[piece.name] = reasons
        return True

    def _merged(
        self, board: Board, seed: Bin, others: list[Bin], widest: int | None
    ) -> tuple[float, Load, tuple[int, ...], Priced] | None:
        gpus = seed.gpus
        for each in others:
            gpus = (*gpus, *each.gpus)
        if board.pricing.are_hopeless([seed.load, *(each.load for each in others)], len(gpus)):
            return None
        load = load_of(
            [*seed.load.pieces, *(piece for each in others for piece in each.load.pieces)]
        )
        gpus = gpus[: min(useful_replicas(load), widest or len(gpus))]
        if board.pricing.is_hopeless(load, len(gpus)):
            return None
        priced = board.holding(load, gpus)
        if priced is None:
            return None
        gain = priced.worth - seed.priced.worth - sum(each.priced.worth for each in others)
        contents = [*((each, None, (), None) for each in others), (seed, load, gpus, priced)]
        return gain - self.tolls.of_change(board, contents), load, gpus, priced


def _is_near(cluster: Cluster, one: tuple[int, ...], other: tuple[int, ...], tier: Tier) -> bool:
    """All of them lie within the tier. Most do not, and a look at two GPUs says so."""
    if tier is Tier.CLUSTER:
        return True
    first, second = cluster.gpus[one[0]], cluster.gpus[other[0]]
    if first.rack != second.rack or (tier is Tier.NODE and first.node != second.node):
        return False
    return cluster.tier((*one, *other)) <= tier


def _row(board: Board, base: str) -> list[Bin]:
    row = [each for each in board.bins.values() if each.base == base]
    return sorted(row, key=lambda each: (-_urgency(each), -each.pressure, each.name))


def best_cut(gain: Callable[[int], float], most: int) -> int:
    """The count in 1..most with the largest gain, if that rises and then falls."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if gain(middle) < gain(middle + 1):
            low = middle + 1
        else:
            high = middle
    near = [count for count in (low - 1, low, low + 1) if 1 <= count <= most]
    return max(near, key=lambda count: (gain(count), -count))


def _urgency(which: Bin) -> float:
    return max(piece.urgency for piece in which.load.pieces)
