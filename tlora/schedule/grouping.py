"""Grouping on a board: who goes where, for the most GPUs' worth with all bounds holding.

Every function changes the board where that helps, and looks at a fixed number of candidates for
each job or group that something happened to, so that a turn's work grows with what happened and
not with the cluster.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tlora.core.decision import Reasons
from tlora.schedule.board import Bin, Board
from tlora.schedule.pieces import Load, Piece, Priced
from tlora.schedule.pricing import no_worse

CANDIDATES = 8
"""Groups looked at for one job."""

FEW = 2
"""Of them, where many jobs are to be placed: the emptiest and the fullest."""

EPSILON = 1e-6
"""GPUs' worth: less is no gain."""


@dataclass(slots=True, eq=False)
class Option:
    """One way to place a job. Never changed; not frozen because it is made very often."""

    gain: float
    target: Bin | None
    """The group that it joins; None: a new one."""

    gpus: tuple[int, ...]
    """Of the new group, or of the one joined."""

    priced: Priced
    donor: Bin | None = None
    """The group that gives GPUs for it."""

    donor_gpus: tuple[int, ...] = ()
    donor_priced: Priced | None = None
    why: str = ""


FAILURES = 6
"""Waiting jobs in a row that find no place, before the others are left for the next turn."""


CAREFULLY = 128
"""Jobs of one turn that are placed with a look at all candidates. For those after them a few do:
nearly always the fullest of the candidates is the best one, or the emptiest."""


Order = Callable[[Piece], tuple[float, int]]


def most_urgent(piece: Piece) -> tuple[float, int]:
    return (-piece.urgency, piece.rank)


def most_needy(piece: Piece) -> tuple[float, int]:
    return (-piece.needs, piece.rank)


def densest(piece: Piece) -> tuple[float, int]:
    return (-piece.density, piece.rank)


def smallest(piece: Piece) -> tuple[float, int]:
    return (piece.needs, piece.rank)


def place_waiting(board: Board, widest: int | None, order: Order = most_urgent) -> list[Piece]:
    """Jobs without a group, one after another: on free GPUs, beside others, or on GPUs that a
    wide group can spare. Returns those that were placed; the others wait on."""
    waiting = board.waiting()
    waiting.sort(key=order)
    placed: list[Piece] = []
    failures: dict[str, int] = {}
    for piece in waiting:
        if failures.get(piece.base, 0) >= FAILURES:
            continue
        if place(board, piece, widest, carefully=len(placed) < CAREFULLY):
            placed.append(piece)
        elif can_run(board, piece, widest):
            failures[piece.base] = failures.get(piece.base, 0) + 1
    return placed


def place(board: Board, piece: Piece, widest: int | None = None, *, carefully: bool = True) -> bool:
    option = on_free(board, piece, widest)
    if option is None:
        options = [*joins(board, piece, carefully), *donations(board, piece, widest)]
        option = max(options, key=lambda each: each.gain, default=None)
    if option is None:
        option = on_any_free(board, piece, widest)
    if option is None:
        return False
    carry_out(board, piece, option)
    return True


def can_run(board: Board, piece: Piece, widest: int | None = None) -> bool:
    """Alone on GPUs that are up its bound would hold. It does on those that it brings; where some
    of these are lost or slow, or there never were so many, it may have to wait for better times."""
    state, cluster = board.state, board.cluster
    brings = piece.figures.solo_plan.replicas
    if not state.is_damaged and brings <= min(len(cluster), widest or brings):
        return True
    up = set(range(len(cluster))) - state.down
    asked = board.pricing.asked
    found = any(
        board.holding(piece.alone, gpus) is not None
        for count in range(_most(piece, len(up), widest), 0, -1)
        if (gpus := board.choose_from(up, count)) is not None
    )
    # It is on nobody's budget: what is decided about others does not depend on it.
    board.pricing.asked = asked
    return found


def carry_out(board: Board, piece: Piece, option: Option) -> None:
    before = 0.0
    if option.donor is not None and option.donor_priced is not None:
        before += option.donor.priced.worth
        board.resize(option.donor, option.donor_gpus, option.donor_priced)
        option.donor.reasons = Reasons(
            why=f"{piece.name} needs a GPU more than it",
            before=before,
            after=option.donor_priced.worth,
            bound_by=option.donor_priced.bound_by,
        )
    if option.target is None:
        board.open(piece.alone, option.gpus, option.priced)
    else:
        before += option.target.priced.worth
        board.put(piece, option.target, option.priced)
    after = option.priced.worth + (option.donor_priced.worth if option.donor_priced else 0.0)
    board.why[piece.name] = Reasons(
        why=option.why,
        before=before,
        after=after,
        slowdown=board.slowest(option.priced),
        bound_by="" if option.target is None else option.priced.bound_by,
    )


def _most(piece: Piece, most: int, widest: int | None) -> int:
    """Of so many GPUs, those that it may have for itself."""
    return min(piece.figures.solo_plan.replicas, widest or most, most)


def widths(piece: Piece, most: int, widest: int | None = None) -> list[int]:
    """Numbers of GPUs to try for it alone, the largest first: its due, then half of that, and so
    on."""
    due = max(1, min(_most(piece, most, widest), -int(-piece.fair_gpus // 1)))
    found: list[int] = []
    while due >= 1:
        found.append(due)
        due //= 2
    return found


def on_free(board: Board, piece: Piece, widest: int | None = None) -> Option | None:
    if not board.free:
        return None
    load = piece.alone
    for count in widths(piece, len(board.free), widest):
        gpus = board.choose(count)
        if gpus is None:
            continue
        priced = board.holding(load, gpus)
        if priced is not None:
            free = "a GPU is" if count == 1 else f"{count} GPUs are"
            return Option(priced.worth, None, gpus, priced, why=f"{free} free")
    return None


def on_any_free(board: Board, piece: Piece, widest: int | None = None) -> Option | None:
    """More than its due or less, where nothing else is left: better than to wait beside GPUs that
    idle."""
    free = len(board.free)
    tried = set(widths(piece, free, widest))
    for count in range(1, _most(piece, free, widest) + 1):
        gpus = None if count in tried else board.choose(count)
        priced = board.holding(piece.alone, gpus) if gpus is not None else None
        if gpus is not None and priced is not None:
            return Option(priced.worth, None, gpus, priced, why=f"{count} GPUs are free")
    return None


def joins(board: Board, piece: Piece, carefully: bool = True) -> Iterable[Option]:
    targets = board.roomiest(piece.base, CANDIDATES)
    if not carefully and len(targets) > FEW:
        targets = [targets[0], *targets[1 - FEW :]]
    for target in targets:
        if board.pricing.is_hopeless(target.load, len(target.gpus), piece):
            continue
        priced = board.holding(target.load.plus(piece), target.gpus)
        if priced is not None:
            gain = priced.worth - target.priced.worth
            yield Option(gain, target, target.gpus, priced, why=f"{target.name} has room for it")


def donations(board: Board, piece: Piece, widest: int | None = None) -> Iterable[Option]:
    """A wide group goes on with fewer GPUs, and the job gets the others."""
    alone = piece.alone
    for donor in board.widest(CANDIDATES):
        for count in widths(piece, len(donor.gpus) - 1, widest):
            if board.pricing.is_hopeless(donor.load, len(donor.gpus) - count):
                continue
            kept, given = split_gpus(board, donor, count)
            rest = board.holding(donor.load, kept)
            if rest is None:
                continue
            priced = board.holding(alone, given)
            if priced is not None:
                yield Option(
                    priced.worth + rest.worth - donor.priced.worth,
                    None,
                    given,
                    priced,
                    donor,
                    kept,
                    rest,
                    why=f"{donor.name} can spare it",
                )


def split_gpus(board: Board, donor: Bin, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Those it keeps and those it gives: slowed ones and the last of them go first."""
    gpus, speeds = donor.gpus, board.state.speed
    found = board.splits.get((gpus, count))
    if found is None:
        order = sorted(gpus, key=lambda gpu: (speeds.get(gpu, 1.0), -gpu))
        given = set(order[:count])
        kept = tuple(gpu for gpu in gpus if gpu not in given)
        found = board.splits[gpus, count] = kept, tuple(sorted(given))
    return found


def trade_gpus(board: Board, widest: int | None = None) -> bool:
    """GPUs from the wide groups that lose least by it to groups of this turn that gain most."""
    takers = [board.bins[name] for name in sorted(board.touched) if name in board.bins]
    takers = [each for each in takers if useful_replicas(each.load) > len(each.gpus)]
    helped = False
    for taker in takers[:CANDIDATES]:
        best: tuple[float, Gift, tuple[int, ...], Priced] | None = None
        for gift in gifts(board, taker):
            width = len(taker.gpus) + len(gift.given)
            if width > min(useful_replicas(taker.load), widest or width):
                continue
            gpus = (*taker.gpus, *gift.given)
            more = board.price(taker.load, gpus)
            gain = more.worth - taker.priced.worth - gift.loss
            if gain <= EPSILON or not no_worse(more, taker.priced):
                continue
            if best is None or gain > best[0]:
                best = (gain, gift, gpus, more)
        if best is not None:
            _, gift, gpus, more = best
            donor, rest = gift.donor, gift.priced
            before = donor.priced.worth + taker.priced.worth
            board.resize(donor, gift.kept, rest)
            board.resize(taker, gpus, more)
            why = f"{taker.name} makes more of GPUs than {donor.name}"
            for each in (donor, taker):
                each.reasons = Reasons(why=why, before=before, after=rest.worth + more.worth)
            helped = True
    return helped


@dataclass(frozen=True, slots=True)
class Gift:
    """GPUs that a wide group could do without."""

    loss: float
    donor: Bin
    kept: tuple[int, ...]
    given: tuple[int, ...]
    priced: Priced
    """Of the donor, after it."""


GIFTS = 6
"""Looked at, those that lose least."""


def gifts(board: Board, taker: Bin | None) -> list[Gift]:
    found: list[Gift] = []
    for donor in board.widest(GIFTS):
        if donor is taker:
            continue
        for count in sorted({1, 2, len(donor.gpus) // 2}):
            if count >= len(donor.gpus):
                continue
            kept, given = split_gpus(board, donor, count)
            rest = board.holding(donor.load, kept)
            if rest is not None:
                found.append(Gift(donor.priced.worth - rest.worth, donor, kept, given, rest))
    found.sort(key=lambda each: each.loss / len(each.given))
    return found[:GIFTS]


def useful_replicas(load: Load) -> int:
    """More than a round has sequences are of no use."""
    return max(1, int(load.sequences + 1e-9))
