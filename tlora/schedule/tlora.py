"""Our policy: jobs grouped by what their groups have left, for the most GPUs' worth.

A turn: place those that wait, most urgent first; improve on that; where some still wait, make
room; where GPUs are left over, give them to who gains most; relieve jobs whose bounds are broken;
and at ticks look whether whole groups should be merged. Jobs that run are moved only where that
earns its cost, and not often.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tlora.core.decision import Decision, Reasons, Refuse
from tlora.core.event import Arrival, Event, Tick
from tlora.core.state import JobState, State
from tlora.core.wording import number_of
from tlora.costs.groups import Costs
from tlora.schedule.board import Board
from tlora.schedule.grouping import (
    CANDIDATES,
    CAREFULLY,
    EPSILON,
    Order,
    can_run,
    densest,
    most_needy,
    most_urgent,
    place_waiting,
    smallest,
)
from tlora.schedule.improving import clear_out, exchange, improve, spread
from tlora.schedule.merging import Merging
from tlora.schedule.pieces import Piece, Pieces
from tlora.schedule.policy import Policy
from tlora.schedule.preempting import (
    make_way,
    next_patience_end,
    overdue_outside,
    stand_in,
    take_turns,
)
from tlora.schedule.settings import Settings
from tlora.schedule.tolls import Tolls

PASSES = 4
"""Of placing and improving, per turn."""

FEW_AT_ONCE = 8
"""Jobs of one turn that are placed in several orders, of which the best is kept."""

WORTH_ANOTHER = 0.05
"""By this part of the worth at stake must another order be better, where as many jobs run."""

OTHER_ORDERS: tuple[Order, ...] = (densest, most_needy, smallest)

MOST_BUDGETS, FEWEST_BUDGETS = 32, 8
"""Of all jobs that a turn places; the fewer where more jobs have come than are placed carefully."""

CLEARED = 12
"""New groups that a turn tries to dissolve: by the time it takes that gains more than swaps do."""

RUNNING_LOOKED_AT = 4
"""Running jobs, of the groups nearest to or beyond their bounds, that a turn tries to move."""

SEEDS = 1
"""Groups per tier that a tick tries to merge others into."""


class Quiet(NamedTuple):
    """After a turn in which all jobs ran and nothing was found to do. While nothing happens and the
    same jobs may be moved, nothing but what takes turns from tick to tick can be found: gains stay,
    and tolls grow as jobs near their ends."""

    state: State
    revision: int
    until: float
    """Then one more job may be moved."""

    movable: set[str]
    board: Board


class Tlora(Policy):
    overtakes = True

    def __init__(self, costs: Costs, settings: Settings | None = None, name: str = "tlora") -> None:
        self.name = name
        self.costs = costs
        self.settings = settings or Settings()
        self.pieces = Pieces(costs)
        self._fitting: set[str] = set()
        self.tolls = Tolls(costs, self.settings.horizon_s)
        self.merging = Merging(self.tolls, audit=self.settings.audit)
        self._quiet: Quiet | None = None

    @property
    def cut_misses(self) -> int:
        return self.merging.misses

    @property
    def is_quiet(self) -> bool:
        """After the last turn: a tick would find nothing but what takes turns."""
        return self._quiet is not None

    def decide(self, state: State, events: Sequence[Event]) -> list[Decision]:
        jobs = state.runnable()
        if not state.up_gpus or (state.groups and _concerns_nobody(events, jobs)):
            return []
        ticks = any(isinstance(event, Tick) for event in events)
        outside = overdue_outside(state, self.costs, self.settings)
        quiet, self._quiet = self._quiet, None
        if (
            ticks
            and not outside
            and quiet is not None
            and quiet.state is state
            and quiet.revision == state.revision
            and state.now < quiet.until
        ):
            self.pieces.credit(state)
            self._merge(quiet.board, quiet.movable)
            self._quiet = None if quiet.board.touched else quiet
            return quiet.board.decisions(everywhere=True)
        refused = found = self._refused(state, jobs)
        if refused:
            # The others are due more without these, and whoever comes in instead is looked at.
            without = copy.deepcopy(state)
            while found:
                for decision in found:
                    without.apply(decision)
                found = self._refused(without, without.runnable())
                refused += found
            return [*refused, *self.decide(without, events)]
        pieces = self.pieces.of(state)
        if not pieces:
            return []
        loads = self.pieces.loads(state, pieces)
        overdue = self.pieces.of_outside(state, outside)
        board = Board(state, self.costs, pieces | overdue, loads)
        if overdue:
            board.barred |= overdue.keys()
            movable = self._movable(state, pieces.values())
            take_turns(board, list(overdue.values()), movable, self._widest)
        self._place(board)
        waiting = board.waiting()
        hindered = [piece for piece in waiting if not can_run(board, piece, self._widest)]
        if hindered:
            stand_in(board, overdue.values(), hindered, self._widest)
            if not board.bins and not state.is_damaged:
                return [self._never(board, piece) for piece in hindered]
            waiting = [piece for piece in waiting if piece not in hindered]
        if waiting:
            make_way(board, waiting, self.settings)
        if board.free:
            movable = self._movable(state, _pressed(board))
            names = {piece.name for piece in movable}
            spread(board, self.tolls, names, self._widest, uncounted=True)
        self._relieve(board)
        if ticks:
            movable = self._movable(state, pieces.values())
            self._merge(board, {piece.name for piece in movable})
        if not board.touched and not board.waiting() and not overdue:
            self._quiet = self._be_quiet(board)
        return board.decisions(everywhere=ticks)

    def _be_quiet(self, board: Board) -> Quiet:
        state, pieces = board.state, board.pieces.values()
        movable = {piece.name for piece in self._movable(state, pieces)}
        others = [piece for piece in pieces if piece.name not in movable]
        until = min((self._movable_from(piece) for piece in others), default=math.inf)
        return Quiet(state, state.revision, until, movable, board)

    def _merge(self, board: Board, movable: set[str]) -> None:
        if board.is_contended and board.bins:
            self.merging.merge(board, movable, self._widest, SEEDS)

    def look_by(self, state: State) -> float:
        return next_patience_end(state, self.costs, self.settings)

    @property
    def _widest(self) -> int | None:
        return self.settings.max_replicas

    def _place(self, board: Board) -> None:
        """Those that wait; on paper they may be moved about until it is good."""
        arrived = [piece for piece in board.pieces.values() if piece.job.group is None]
        first = board.remember() if self._is_worth_orders(board, arrived) else None
        self._place_in_order(board, arrived, most_urgent)
        if first is None or (board.free and not board.waiting()):
            return
        best = (board.running, board.worth)
        # The best of several predictions is too good: little more is no more.
        margin = WORTH_ANOTHER * sum(
            board.bins[name].priced.worth for name in board.touched if name in board.bins
        )
        for order in OTHER_ORDERS:
            found = board.remember()
            board.go_back(first)
            first = board.remember()
            self._place_in_order(board, arrived, order)
            then = (board.running, board.worth)
            if then > (best[0], best[1] + margin + EPSILON):
                best = then
            else:
                board.go_back(found)

    def _is_worth_orders(self, board: Board, arrived: Sequence[Piece]) -> bool:
        """A few jobs at once that have to share; nobody is passed over who has waited long."""
        return (
            board.is_contended
            and 1 < len(arrived) <= FEW_AT_ONCE
            and all(piece.urgency <= 1 + EPSILON for piece in arrived)
        )

    def _place_in_order(self, board: Board, arrived: Sequence[Piece], order: Order) -> None:
        few = len(arrived) <= CAREFULLY
        budget = self.settings.budget * (MOST_BUDGETS if few else FEWEST_BUDGETS)
        for _ in range(PASSES):
            helped = bool(place_waiting(board, self._widest, order))
            placed = [piece for piece in arrived if board.place[piece.name] is not None]
            if not placed or budget <= 0:
                return
            asked = board.pricing.asked
            most = min(budget, self.settings.budget * len(placed))
            improve(board, self.tolls, placed, budget=most, widest=self._widest)
            if len(placed) > 1:
                helped |= clear_out(board, self.tolls, placed, tries=CLEARED, widest=self._widest)
            if len(placed) < len(arrived):
                helped |= exchange(board, placed)
            elif len(placed) == 1:
                return
            if not helped:
                return
            budget -= board.pricing.asked - asked

    def _relieve(self, board: Board) -> None:
        """Jobs of groups whose bounds are broken, because dues rose or a GPU became slow."""
        pressed = [
            which for base in board.bases for which in board.pressed(base, RUNNING_LOOKED_AT)
        ]
        if all(board.pricing.does_hold(which.load, which.gpus) for which in pressed):
            return
        # The prices of all are known to the board then, and not counted again.
        broken = [
            piece for which in pressed if not which.priced.holds for piece in which.load.pieces
        ]
        those = self._movable(board.state, broken)[:RUNNING_LOOKED_AT]
        improve(board, self.tolls, those, budget=self.settings.budget, widest=self._widest)

    def _movable(self, state: State, pieces: Iterable[Piece]) -> list[Piece]:
        """Those that may be moved now: not just placed, not moved too often."""
        now, settings = state.now, self.settings
        return [
            piece
            for piece in pieces
            if piece.job.group is None
            or (
                now - piece.job.since_s >= settings.min_stay_s
                and piece.job.moves
                < 2 + (now - piece.job.request.arrival_s) / 3600 * settings.moves_per_hour
            )
        ]

    def _movable_from(self, piece: Piece) -> float:
        """When a job that may not be moved may be, or a little earlier: rounding."""
        job, settings = piece.job, self.settings
        from_s = job.since_s + settings.min_stay_s
        if job.moves >= 2:
            per_hour = max(settings.moves_per_hour, 1e-9)
            from_s = max(from_s, job.request.arrival_s + 3600 * (job.moves - 2) / per_hour)
        return from_s - 1.0

    def _refused(self, state: State, jobs: Iterable[JobState]) -> list[Refuse]:
        """Jobs that would not fit on a GPU by themselves."""
        result: list[Refuse] = []
        for job in jobs:
            request = job.request
            if job.group is not None or request.name in self._fitting:
                continue
            base = self.costs.base(request.base)
            figures = self.costs.figures(request)
            bucket = base.buckets[0]
            rows = base.rows(min(figures.mean_length, bucket), bucket)
            memory, fits = base.memory(rows, figures.longest, bucket, figures.parameters)
            if not fits:
                why = f"alone it would take {memory / 2**30:.1f} GiB of a GPU"
                result.append(Refuse(job=job.name, reasons=Reasons(why=why, bound_by="memory")))
            else:
                self._fitting.add(request.name)
        self._fitting &= state.jobs.keys()
        return result

    def _never(self, board: Board, piece: Piece) -> Refuse:
        """One that the whole cluster is too small for, found out when nobody else is there: beside
        others it is due less, and may have run."""
        gpus = min(len(board.cluster), self._widest or len(board.cluster))
        request = piece.job.request
        why = (
            f"it brings {number_of(request.gpus, 'GPU')}, and on {gpus} it would be slower than "
            f"its bound of {request.slowdown_bound:g} allows"
        )
        return Refuse(job=piece.name, reasons=Reasons(why=why, bound_by="GPUs of the cluster"))


def _pressed(board: Board) -> list[Piece]:
    return [
        piece
        for base in board.bases
        for which in board.pressed(base, CANDIDATES)
        for piece in which.load.pieces
    ]


def _concerns_nobody(events: Sequence[Event], runnable: Sequence[JobState]) -> bool:
    """Only jobs have come, and they are too many to be looked at yet. Whoever is in the line may
    stand elsewhere in it by now: where nothing runs, that is looked at."""
    if not events or not all(isinstance(event, Arrival) for event in events):
        return False
    names = {event.request.name for event in events if isinstance(event, Arrival)}
    return not any(job.name in names for job in reversed(runnable))
