"""What a regrouping costs, in the unit of what it gains: GPUs' worth, over the horizon.

A change that gains G GPUs' worth earns G x horizon; its moves lose seconds of training. Only
jobs that run pay: one that waits has to be started anyhow. The horizon is short for jobs that are
nearly through: they would not live to see the gain.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tlora.costs.groups import Costs
from tlora.schedule.board import Bin, Board
from tlora.schedule.pieces import Load, Piece, Priced

HORIZON_S = 1800.0
"""A gain is taken to last so long: then others have come and gone."""

HYSTERESIS = 2.0
"""A change must earn its toll so many times."""


class _Seconds(NamedTuple):
    """Of one base."""

    start: float
    move: float
    leave: float
    join: float


class Tolls:
    def __init__(self, costs: Costs, horizon_s: float = HORIZON_S) -> None:
        self.costs = costs
        self.horizon_s = horizon_s
        self._kept: dict[str, _Seconds] = {}

    def of_change(
        self,
        board: Board,
        contents: Sequence[tuple[Bin | None, Load | None, tuple[int, ...], Priced | None]],
    ) -> float:
        """To be taken off its gain."""
        lost = 0.0
        for which, load, gpus, _ in contents:
            if load is None:
                continue
            name = which.name if which is not None else None
            for piece in load.pieces:
                lost += self._of_piece(board, piece, name, which is None or which.is_new)
            if which is not None and not which.is_new and set(gpus) - set(which.gpus):
                lost += self.costs.resize_s(which.base, grows=True) * which.priced.worth
        return HYSTERESIS * lost / self.horizon_s

    def of_moves(self, board: Board, pieces: Iterable[Piece]) -> float:
        """Of jobs that are now elsewhere on the board than they run."""
        lost = 0.0
        for piece in pieces:
            name = board.place[piece.name]
            lost += self._of_piece(board, piece, name, name is None or board.bins[name].is_new)
        return HYSTERESIS * lost / self.horizon_s

    def _of_piece(self, board: Board, piece: Piece, target: str | None, is_new: bool) -> float:
        """GPUs' worth x seconds that are lost if it goes there."""
        old = piece.job.group
        if old is None or old == target:
            return 0.0
        seconds = self._kept.get(piece.base) or self._seconds(piece.base)
        # Its own standing still, and that of the groups it leaves and joins.
        lost = (seconds.start if is_new else seconds.move) * piece.gpus
        source = board.bins.get(old)
        if source is not None:
            lost += seconds.leave * source.priced.worth
        if target is not None and target in board.bins:
            lost += seconds.join * board.bins[target].priced.worth
        remaining_s = piece.job.remaining_steps * piece.figures.solo_step_s
        return lost * max(1.0, self.horizon_s / max(remaining_s, 1e-9))

    def _seconds(self, base: str) -> _Seconds:
        costs = self.costs
        found = _Seconds(
            costs.start_s(base), costs.move_s(base), costs.leave_s(base), costs.join_s(base)
        )
        self._kept[base] = found
        return found
