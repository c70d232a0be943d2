"""Better places for some of the jobs. Hill climbing: of each job's moves, swaps and hand-overs the
best is taken, until none helps or the turn's budget of questions is spent.

A job that was placed in this turn runs nowhere yet, and moving it costs nothing. One that runs pays
a toll (`tolls.py`), which the change must earn.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from tlora.core.decision import Reasons
from tlora.schedule.board import Bin, Board
from tlora.schedule.grouping import (
    CANDIDATES,
    EPSILON,
    carry_out,
    joins,
    place_waiting,
    split_gpus,
    trade_gpus,
    useful_replicas,
)
from tlora.schedule.pieces import Load, Piece, Priced
from tlora.schedule.pricing import no_worse
from tlora.schedule.tolls import Tolls

ROUNDS = 4

_patience = attrgetter("limit_s", "rank")

LEAVERS = 4
"""Jobs of one group that are looked at when GPUs are to be used."""

CLEARLY = 0.15
"""Of the worth at stake."""


@dataclass(slots=True)
class Change:
    """New contents of some groups; one without jobs ends, one without a name is new."""

    gain: float
    contents: list[tuple[Bin | None, Load | None, tuple[int, ...], Priced | None]]


def improve(
    board: Board, tolls: Tolls, those: Iterable[Piece], *, budget: int, widest: int | None
) -> None:
    """`budget`: prices asked for at most, give or take one job's. `widest`: replicas of a group."""
    pieces = list(those)
    movable = {piece.name for piece in pieces}
    stop = board.pricing.asked + budget
    for _ in range(ROUNDS):
        helped = False
        for piece in pieces:
            if board.pricing.asked > stop:
                return
            best = Best(board, tolls)
            best.offer(list(_changes(board, piece, movable, widest)))
            helped |= best.take()
        if pieces and board.pricing.asked <= stop:
            helped |= spread(board, tolls, movable, widest)
            helped |= trade_gpus(board, widest)
        if not helped:
            return


def _changes(board: Board, piece: Piece, movable: set[str], widest: int | None) -> Iterator[Change]:
    name = board.place[piece.name]
    if name is None:
        return
    source = board.bins[name]
    yield from _relocations(board, source)
    if len(source.load.pieces) == 1:
        yield from _hand_overs(board, piece, source, movable, widest)
        return
    rest = source.load.without(piece)
    rest_priced = board.price(rest, source.gpus)
    alone = piece.alone
    if no_worse(rest_priced, source.priced):
        for target in board.roomiest(piece.base, CANDIDATES):
            if target is not source and not board.pricing.is_hopeless(
                target.load, len(target.gpus), piece
            ):
                load = target.load.plus(piece)
                priced = board.holding(load, target.gpus)
                if priced is not None:
                    gain = priced.worth + rest_priced.worth
                    gain -= target.priced.worth + source.priced.worth
                    yield Change(
                        gain,
                        [
                            (source, rest, source.gpus, rest_priced),
                            (target, load, target.gpus, priced),
                        ],
                    )
    # Out of a wide group with some of its GPUs, or onto those of another.
    for donor in board.widest(CANDIDATES):
        for count in {1, len(donor.gpus) // 2}:
            if count > (widest or count):
                continue
            kept, given = split_gpus(board, donor, count)
            mine = board.holding(alone, given)
            if mine is None:
                continue
            if donor is source:
                left = board.holding(rest, kept)
                if left is not None:
                    gain = left.worth + mine.worth - source.priced.worth
                    yield Change(gain, [(source, rest, kept, left), (None, alone, given, mine)])
            elif no_worse(rest_priced, source.priced):
                left = board.holding(donor.load, kept)
                if left is not None:
                    gain = left.worth + mine.worth + rest_priced.worth
                    gain -= donor.priced.worth + source.priced.worth
                    yield Change(
                        gain,
                        [
                            (source, rest, source.gpus, rest_priced),
                            (donor, donor.load, kept, left),
                            (None, alone, given, mine),
                        ],
                    )
    yield from _swaps(board, piece, source, rest, movable)


def _relocations(board: Board, source: Bin) -> Iterator[Change]:
    """The whole group to free GPUs, away from slow ones or nearer to each other."""
    gpus = board.choose(len(source.gpus))
    if gpus is not None and (board.state.speed or len(gpus) > 1):
        priced = board.price(source.load, gpus)
        if no_worse(priced, source.priced):
            gain = priced.worth - source.priced.worth
            yield Change(gain, [(source, source.load, gpus, priced)])


def _swaps(
    board: Board, piece: Piece, source: Bin, rest: Load, movable: set[str]
) -> Iterator[Change]:
    """The job and one of another group change places."""
    for target in board.roomiest(piece.base, CANDIDATES):
        if target is source:
            continue
        for other in target.load.pieces:
            if other.name not in movable or other.is_like(piece):
                continue
            one, two = rest.plus(other), target.load.exchanged(other, piece)
            mine = board.price(one, source.gpus)
            if not no_worse(mine, source.priced):
                continue
            theirs = board.price(two, target.gpus)
            if no_worse(theirs, target.priced):
                gain = mine.worth + theirs.worth - source.priced.worth - target.priced.worth
                yield Change(
                    gain, [(source, one, source.gpus, mine), (target, two, target.gpus, theirs)]
                )


def _hand_overs(
    board: Board, piece: Piece, source: Bin, movable: set[str], widest: int | None
) -> Iterator[Change]:
    """A job that is alone joins another group, and its GPUs go to whoever makes most of them.
    Where GPUs abound that must be clearly better: the best of many predictions is too good."""
    margin = 0.0 if board.is_contended else CLEARLY
    takers = _takers(board, source, movable)
    # Somebody must want them: beside others it makes no more than on GPUs of its own.
    uses = list(_uses(board, source.gpus, takers, widest))
    for target in board.roomiest(piece.base, CANDIDATES):
        if target is source:
            continue
        load = target.load.plus(piece)
        lost = target.priced.worth + source.priced.worth
        others = [each for each in target.load.pieces if each.name in movable]
        priced = board.holding(load, target.gpus) if uses or others else None
        if priced is not None:
            moved = (target, load, target.gpus, priced)
            for use in uses:
                if all(which is not target for which, *_ in use.contents):
                    gain = priced.worth - lost + use.gain
                    if gain > margin * lost:
                        yield Change(gain, [(source, None, (), None), moved, *use.contents])
            # One of the target's jobs takes the GPUs instead.
            for other in others:
                without = target.load.exchanged(other, piece)
                rest = board.holding(without, target.gpus)
                mine = board.holding(other.alone, source.gpus)
                if rest is not None and mine is not None:
                    yield Change(
                        rest.worth + mine.worth - lost,
                        [
                            (source, None, (), None),
                            (target, without, target.gpus, rest),
                            (None, other.alone, source.gpus, mine),
                        ],
                    )
        pooled = (*target.gpus, *source.gpus)
        if len(pooled) <= min(useful_replicas(load), widest or len(pooled)):
            both = board.holding(load, pooled)
            if both is not None and both.worth > (1 + margin) * lost:
                yield Change(
                    both.worth - lost, [(source, None, (), None), (target, load, pooled, both)]
                )


def spread(
    board: Board,
    tolls: Tolls,
    movable: set[str],
    widest: int | None,
    *,
    uncounted: bool = False,
) -> bool:
    """Free GPUs to whoever makes most of them: a group that grows, or a job that leaves one.
    `uncounted`: nobody asks any more how many prices were asked for, and what cannot be the best is
    left out."""
    helped = False
    while board.free:
        takers = _takers(board, None, movable)
        if not takers:
            return helped
        most = min(len(board.free), max(taker.most for taker in takers), widest or len(board.free))
        best, fewer = Best(board, tolls), 0
        for count in sorted({1, min(2, most), most}):
            gpus = board.choose(count)
            assert gpus is not None, f"{count} of {len(board.free)} free GPUs"
            # Slow GPUs may make more of them worse: nothing is left out.
            uses = (
                _best_uses(best, gpus, takers, widest, fewer)
                if uncounted and not board.state.speed
                else _uses(board, gpus, takers, widest)
            )
            best.offer(uses)
            fewer = count
        if not best.take():
            return helped
        helped = True
    return helped


class Best:
    """Of some changes the one that gains most after its toll. The toll is asked for only where the
    gain is the largest so far."""

    def __init__(self, board: Board, tolls: Tolls) -> None:
        self.board = board
        self.tolls = tolls
        self.change: Change | None = None
        self.net = EPSILON

    def offer(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if change.gain > self.net:
                left = change.gain - self.tolls.of_change(self.board, change.contents)
                if left > self.net:
                    self.change, self.net = change, left

    def take(self) -> bool:
        change = self.change
        if change is None:
            return False
        toll = self.tolls.of_change(self.board, change.contents)
        _apply(self.board, change, toll * self.tolls.horizon_s)
        return True


def clear_out(
    board: Board, tolls: Tolls, those: Iterable[Piece], *, tries: int, widest: int | None
) -> bool:
    """A group is dissolved, its jobs go to others, and its GPUs to those that wait or make more of
    them: kept if more jobs run then, or as many for more GPUs' worth, tolls paid."""
    helped = False
    movable = {piece.name for piece in those}
    now = (board.running, board.worth)
    for name in list(board.bins)[-tries:]:
        which = board.bins.get(name)
        if which is None or any(piece.name not in movable for piece in which.load.pieces):
            continue
        memory = board.remember()
        pieces = which.load.pieces
        board.rearrange([(which, None, (), None)])
        freed = board.free & set(which.gpus)
        board.free -= freed
        for piece in pieces:
            board.place[piece.name] = None
        if all(_best_join(board, piece) for piece in sorted(pieces, key=_bulk)):
            board.free |= freed
            placed = place_waiting(board, widest)
            spread(board, tolls, movable | {piece.name for piece in placed}, widest)
            then = (board.running, board.worth - tolls.of_moves(board, pieces))
            if then > (now[0], now[1] + EPSILON):
                helped = True
                now = (board.running, board.worth)
                continue
        board.go_back(memory)
    return helped


def _bulk(piece: Piece) -> tuple[float, int]:
    return (-piece.figures.batch_tokens, piece.rank)


def _best_join(board: Board, piece: Piece) -> bool:
    option = max(joins(board, piece), key=lambda each: each.gain, default=None)
    if option is None:
        return False
    carry_out(board, piece, option)
    return True


@dataclass(slots=True)
class Taker:
    """A group that could make something of more GPUs."""

    which: Bin
    growth: int
    """GPUs that it could use itself."""

    leavers: list[Piece]
    """Jobs that could take them, and leave more to the others."""

    @property
    def most(self) -> int:
        """GPUs that somebody could use."""
        return max([self.growth, *[piece.useful for piece in self.leavers]])


def _takers(board: Board, source: Bin | None, movable: set[str]) -> list[Taker]:
    """Others than `source`."""
    found: list[Taker] = []
    for base in board.bases:
        for which in board.pressed(base, CANDIDATES):
            if which is source:
                continue
            growth = useful_replicas(which.load) - len(which.gpus)
            leavers: list[Piece] = []
            if len(which.load.pieces) > 1:
                leavers = _most_pressing(which, movable)
            if growth > 0 or leavers:
                found.append(Taker(which, growth, leavers))
    return found


def _uses(
    board: Board, gpus: tuple[int, ...], takers: Iterable[Taker], widest: int | None
) -> Iterator[Change]:
    """What these could make of the GPUs."""
    for taker in takers:
        yield from _growth(board, gpus, taker, widest)
        which = taker.which
        for other in taker.leavers:
            mine = board.holding(other.alone, gpus)
            if mine is not None:
                yield from _departure(board, gpus, which, other, mine)


def _best_uses(
    best: Best, gpus: tuple[int, ...], takers: Iterable[Taker], widest: int | None, fewer: int
) -> Iterator[Change]:
    """The same without those that cannot be better than the best so far. `fewer`: GPUs that were
    tried before."""
    board = best.board
    for taker in takers:
        yield from _growth(board, gpus, taker, widest)
        which = taker.which
        for other in taker.leavers:
            if other.useful <= fewer:
                continue
            mine = board.holding(other.alone, gpus)
            if mine is None:
                continue
            most = board.pricing.most_without(which.load, other, len(which.gpus))
            if most + mine.worth - which.priced.worth > best.net:
                yield from _departure(board, gpus, which, other, mine)


def _growth(
    board: Board, gpus: tuple[int, ...], taker: Taker, widest: int | None
) -> Iterator[Change]:
    which = taker.which
    if len(gpus) <= taker.growth and len(which.gpus) + len(gpus) <= (widest or math.inf):
        pooled = (*which.gpus, *gpus)
        more = board.holding(which.load, pooled)
        if more is not None:
            gain = more.worth - which.priced.worth
            yield Change(gain, [(which, which.load, pooled, more)])


def _departure(
    board: Board, gpus: tuple[int, ...], which: Bin, other: Piece, mine: Priced
) -> Iterator[Change]:
    load = which.load.without(other)
    rest = board.price(load, which.gpus)
    if no_worse(rest, which.priced):
        yield Change(
            rest.worth + mine.worth - which.priced.worth,
            [(which, load, which.gpus, rest), (None, other.alone, gpus, mine)],
        )


def _most_pressing(which: Bin, movable: set[str]) -> list[Piece]:
    """A few of its jobs that would leave: those that may be slowed least."""
    found = [piece for piece in which.load.pieces if piece.name in movable]
    return sorted(found, key=_patience)[:LEAVERS]


def _apply(board: Board, change: Change, cost_s: float) -> None:
    touched = [which for which, *_ in change.contents if which is not None]
    before = sum(which.priced.worth for which in touched)
    board.rearrange(change.contents)
    for which, load, _, priced in change.contents:
        if load is None or priced is None:
            continue
        for piece in load.pieces:
            if which is None or piece.job.group != which.name:
                board.why[piece.name] = Reasons(
                    why="it does best there",
                    before=before,
                    after=before + change.gain,
                    slowdown=board.slowest(priced),
                    cost_s=cost_s or None,
                    bound_by=priced.bound_by,
                )


def exchange(board: Board, fresh: Iterable[Piece]) -> bool:
    """Where jobs still wait: the GPUs of a group that has not started, for those that wait instead,
    if more of them can run there, or as many for more GPUs' worth. Nobody who is
    overdue gives way to one who is less so."""
    movable = {piece.name for piece in fresh}
    helped = False
    for base in sorted({piece.base for piece in board.waiting()}):
        for which in list(board.bins.values())[-CANDIDATES:]:
            if which.name not in board.bins or not which.is_new:
                continue
            if any(piece.name not in movable for piece in which.load.pieces):
                continue
            helped |= _exchange_one(board, which, base)
    return helped


def _fewest_tokens(piece: Piece) -> float:
    return piece.figures.batch_tokens


def _most_patient(piece: Piece) -> float:
    return -piece.limit_s


def _most_worth(piece: Piece) -> float:
    return -piece.worth_s / piece.figures.batch_tokens


def _exchange_one(board: Board, which: Bin, base: str) -> bool:
    evicted = which.load.pieces
    # Who is overdue gives way only to those who are more so.
    urgency = max(piece.urgency for piece in evicted)
    floor = urgency if urgency > 1 + EPSILON else 0.0
    waiting = [piece for piece in board.waiting() if piece.base == base and piece.urgency >= floor]
    if which.base == base:
        waiting += evicted
    best: tuple[int, float, Load, Priced] | None = None
    for order in (_fewest_tokens, _most_patient, _most_worth):
        load: Load | None = None
        priced: Priced | None = None
        for piece in sorted(waiting, key=order)[:CANDIDATES]:
            trial = load.plus(piece) if load else piece.alone
            found = board.holding(trial, which.gpus)
            if found is not None:
                load, priced = trial, found
                option = (len(load.pieces), priced.worth, load, priced)
                if best is None or option[:2] > best[:2]:
                    best = option
    if best is None or best[:2] <= (len(evicted), which.priced.worth + EPSILON):
        return False
    count, worth, load, priced = best
    before = which.priced.worth
    for piece in evicted:
        board.place[piece.name] = None
    board.rearrange([(which, None, (), None), (None, load, which.gpus, priced)])
    for piece in load.pieces:
        board.why[piece.name] = Reasons(
            why=f"{count} jobs can run there instead of {len(evicted)}"
            if count != len(evicted)
            else "it makes more of the GPUs",
            before=before,
            after=worth,
            slowdown=board.slowest(priced),
        )
    return True
