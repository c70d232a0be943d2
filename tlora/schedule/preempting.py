"""Nobody starves: a job that has waited too long takes the GPUs of jobs that are ahead of their
dues. These wait then, and become urgent in their turn."""

import math
from collections.abc import Iterable, Iterator
from itertools import islice

from tlora.core.decision import Reasons
from tlora.core.state import JobState, State
from tlora.costs.groups import Costs, JobFigures
from tlora.schedule.board import Bin, Board
from tlora.schedule.grouping import place
from tlora.schedule.pieces import Piece
from tlora.schedule.settings import Settings

AHEAD = 0.95
"""A group gives way if the most urgent of its jobs is below this part of the waiting one's
urgency."""

MOST_AT_ONCE = 4
"""Of those that have waited too long; the others have their turn when something happens."""

LEAST_PATIENCE_S = 10.0
"""Nobody is made to wait for a job that has waited less."""

QUANTUM_S = 120.0
"""And none of its jobs was placed more recently than this."""

LONGER = 2.0
"""A job gives its turn to one from beyond the limit if it has so many times as much to do."""

VICTIMS = 3
"""Jobs that are tried for that, and one more that is alone in its group."""


def make_way(board: Board, waiting: Iterable[Piece], settings: Settings) -> None:
    """For those of them that have waited too long."""
    now = board.state.now
    waiting = [
        piece
        for piece in waiting
        if piece.job.since_s + patience_s(piece.job, piece.figures, settings) <= now
    ]
    waiting.sort(key=lambda piece: (-piece.urgency, piece.rank))
    for piece in waiting[:MOST_AT_ONCE]:
        _make_way_for(board, piece, settings)


def overdue_outside(state: State, costs: Costs, settings: Settings) -> list[JobState]:
    """Of those beyond the limit, some that have waited too long."""
    return [
        job
        for job in state.outside()
        if job.since_s + patience_s(job, costs.figures(job.request), settings) <= state.now
    ][:MOST_AT_ONCE]


def take_turns(
    board: Board, overdue: list[Piece], movable: list[Piece], widest: int | None
) -> None:
    """Jobs from beyond the limit that have waited too long, each instead of one that runs and has
    much more to do: a pause is little to that."""
    now = board.state.now
    needed = {piece.name: LONGER * _remaining_s(piece) for piece in overdue}
    least = min(needed.values())
    victims = [
        (each, remaining)
        for each in movable
        if each.job.group is not None
        and now - each.job.since_s >= QUANTUM_S
        and (remaining := _remaining_s(each)) >= least
    ]
    victims.sort(key=lambda one: (one[0].gpus, -one[1], one[0].rank))
    for piece in overdue:
        found = (
            each
            for each, remaining in victims
            if remaining >= needed[piece.name] and board.place[each.name] == each.job.group
        )
        for victim in _tried(board, found):
            if _take_turn(board, piece, victim, widest):
                break


def stand_in(
    board: Board, overdue: Iterable[Piece], hindered: list[Piece], widest: int | None
) -> None:
    """Jobs from beyond the limit that have waited too long, for as many that are within it and can
    only wait."""
    left = len(hindered)
    for piece in overdue:
        if left and piece.name in board.barred and place(board, piece, widest):
            board.barred.remove(piece.name)
            left -= 1


def _tried(board: Board, found: Iterator[Piece]) -> list[Piece]:
    """The first, and of the others one whose leaving frees GPUs: where all groups are full, a job
    that shares one leaves no room for another."""
    first = list(islice(found, VICTIMS))
    alone = (each for each in found if _is_alone(board, each))
    return [*first, *islice(alone, 1)]


def _is_alone(board: Board, piece: Piece) -> bool:
    group = board.place[piece.name]
    return group is not None and len(board.bins[group].load.pieces) == 1


def _take_turn(board: Board, piece: Piece, victim: Piece, widest: int | None) -> bool:
    memory = board.remember()
    board.take(victim)
    board.barred.add(victim.name)
    if not place(board, piece, widest):
        board.go_back(memory)
        board.barred.remove(victim.name)
        return False
    board.barred.remove(piece.name)
    board.why[victim.name] = Reasons(
        why=f"only {board.state.max_runnable} may run, and {piece.name} is short and has waited"
    )
    return True


def _remaining_s(piece: Piece) -> float:
    return piece.job.remaining_steps * piece.figures.solo_step_s


def next_patience_end(state: State, costs: Costs, settings: Settings) -> float:
    """When the first of those that wait will have waited too long, or, of one that has and found
    nobody who could give way, half as long again. Never, if none waits."""
    return min(
        (
            _next_end(job.since_s, patience_s(job, costs.figures(job.request), settings), state.now)
            for job in [*state.waiting(), *state.outside()]
        ),
        default=math.inf,
    )


def _next_end(since: float, patience: float, now: float) -> float:
    """After now, or the loop would not go on."""
    while since + patience <= now:
        patience *= 1.5
    return since + patience


def patience_s(job: JobState, figures: JobFigures, settings: Settings) -> float:
    """Of a short job half of its own time: waiting must not make it twice as late."""
    left = job.request.total_steps - job.steps_done
    return min(settings.patience_s, max(LEAST_PATIENCE_S, 0.5 * left * figures.solo_step_s))


def _make_way_for(board: Board, piece: Piece, settings: Settings) -> None:
    now = board.state.now
    ahead = sorted(
        (_urgency(which), which.name)
        for which in board.bins.values()
        if _urgency(which) < AHEAD * piece.urgency
        and all(
            each.job.group is not None and now - each.job.since_s >= QUANTUM_S
            for each in which.load.pieces
        )
    )
    alone = piece.alone
    gpus = tuple(sorted(board.free))
    gone: list[Bin] = []
    useful = min(piece.figures.solo_plan.replicas, settings.max_replicas or len(board.cluster))
    for _, name in ahead:
        gone.append(board.bins[name])
        gpus = (*gpus, *board.bins[name].gpus)
        mine = gpus[-useful:]
        priced = board.holding(alone, mine)
        if priced is None:
            if len(gpus) > useful:
                gone, gpus = [], tuple(sorted(board.free))
            continue
        evicted = [each for which in gone for each in which.load.pieces]
        before = sum(which.priced.worth for which in gone)
        board.rearrange([(which, None, (), None) for which in gone])
        for each in evicted:
            board.place[each.name] = None
            board.why[each.name] = Reasons(
                why=f"it is ahead of its due, and {piece.name} has waited too long"
            )
        board.open(alone, mine, priced)
        board.why[piece.name] = Reasons(
            why=f"it has waited {piece.job.waited_s:.0f} s and others are ahead of their dues",
            before=before,
            after=priced.worth,
            slowdown=board.slowest(priced),
        )
        for each in sorted(evicted, key=lambda one: (-one.urgency, one.rank)):
            place(board, each, settings.max_replicas)
        return


def _urgency(which: Bin) -> float:
    return max(piece.urgency for piece in which.load.pieces)
