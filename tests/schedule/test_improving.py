"""Changes that are tried, and those that are not worth a question."""

import pytest
from support.scheduling import costs_of, request

from tlora.core.cluster import uniform_cluster
from tlora.core.decision import Reasons, Start
from tlora.core.event import Arrival
from tlora.core.plan import Plan
from tlora.core.state import State
from tlora.schedule.board import Board
from tlora.schedule.improving import _hand_overs
from tlora.schedule.pieces import pieces_of


def board_of(jobs: int) -> Board:
    """Each alone on a GPU."""
    cluster = uniform_cluster(jobs)
    state, costs = State(cluster), costs_of(cluster)
    for number in range(jobs):
        state.happen(Arrival(0.0, request(f"j{number}")))
        state.apply(
            Start(
                group=f"g{number}",
                base="llama",
                jobs=(f"j{number}",),
                gpus=(number,),
                plan=Plan(bucket=4096),
                weights=(1.0,),
                reasons=Reasons(why="a test"),
            )
        )
    return Board(state, costs, pieces_of(state, costs))


@pytest.mark.parametrize(("movable", "is_tried"), [({"j0"}, False), ({"j0", "j1"}, True)])
def test_gpus_are_not_handed_over_where_nobody_wants_them(movable, is_tried) -> None:
    """Jobs of one sequence cannot use a second GPU, and those that may not move cannot take it: no
    price of the two on one GPU is asked for. Where the other may move, it is."""
    board = board_of(2)
    piece, source, target = board.pieces["j0"], board.bins["g0"], board.bins["g1"]
    changes = list(_hand_overs(board, piece, source, movable, None))
    asked = target.load.plus(piece).prices
    assert (board.costs.span(target.gpus).key in asked) == is_tried
    if not is_tried:
        assert changes == []
