"""Who takes what: sequences over ranks, jobs over ranks, and who moves."""

import random

import pytest

from tlora.core.dealing import Load
from tlora.core.plan import Plan
from tlora.parallel.dealing import Move, deal_sequences, moves_to_balance
from tlora.parallel.mesh import Place, check_runs, place_of
from tlora.training.group_engine import Part


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_sequence_is_dealt_once_and_no_rank_has_a_sequence_more(num_ranks: int) -> None:
    """The fullest rank has at most the longest sequence more than the emptiest."""
    for seed in range(50):
        generator = random.Random(seed)
        lengths = [generator.randint(1, 100) for _ in range(generator.randint(1, 20))]
        ranks = deal_sequences(lengths, num_ranks, first=seed % num_ranks)
        assert len(ranks) == len(lengths) and set(ranks) <= set(range(num_ranks))
        tokens = [
            sum(length for length, each in zip(lengths, ranks, strict=True) if each == rank)
            for rank in range(num_ranks)
        ]
        assert max(tokens) - min(tokens) <= max(lengths)


def test_batches_of_one_go_round() -> None:
    """So that a job of batch 1 does not live on one rank."""
    assert [deal_sequences([7], 3, first=step % 3)[0] for step in range(4)] == [0, 1, 2, 0]


def test_an_idle_rank_gets_a_job() -> None:
    """What comes nearest to half of the difference."""
    loads = [Load("a", 50, 1), Load("b", 30, 1), Load("c", 20, 1)]
    here = {"a": 0, "b": 0, "c": 0}
    assert moves_to_balance(loads, here, 2) == [Move("a", 0, 1)]


def test_nobody_moves_for_little() -> None:
    """Within the slack, or where a move would only turn it round."""
    loads = [Load("a", 55, 1), Load("b", 45, 1)]
    assert moves_to_balance(loads, {"a": 0, "b": 1}, 2) == []
    assert moves_to_balance([Load("a", 100, 1)], {"a": 0}, 2) == []


def test_nobody_moves_for_less_than_it_costs() -> None:
    """Of 100 the fullest rank gives 50 away: for one move of 49 it does, for one of 50 no more."""
    loads = [Load("a", 50, 1), Load("b", 50, 1)]
    here = {"a": 0, "b": 0}
    settings = {"num_ranks": 2, "rank_cost": 0.0}
    assert moves_to_balance(loads, here, **settings, move_cost=49.0) == [Move("a", 0, 1)]
    assert moves_to_balance(loads, here, **settings, move_cost=50.0) == []


def test_moves_make_the_fullest_rank_emptier() -> None:
    """On random loads, and never by more moves than jobs."""
    for seed in range(100):
        generator = random.Random(seed)
        loads = [Load(f"j{i}", generator.randint(1, 100), 4) for i in range(9)]
        here = {load.job: generator.randint(0, 3) for load in loads}
        moves = moves_to_balance(loads, here, 4)
        after = dict(here)
        for move in moves:
            assert after[move.job] == move.source
            after[move.job] = move.target

        def most(places: dict[str, int], loads: list[Load] = loads) -> float:
            return max(
                sum(load.tokens for load in loads if places[load.job] == rank) for rank in range(4)
            )

        assert most(after) <= most(here) and len(moves) <= len(loads)
        assert not moves or most(after) < most(here)


def test_shards_of_a_copy_are_neighbours() -> None:
    """So that a copy stays inside a node."""
    plan = Plan(bucket=64, replicas=2, fsdp=2)
    assert [place_of(rank, plan) for rank in range(4)] == [
        Place(0, 0),
        Place(0, 1),
        Place(1, 0),
        Place(1, 1),
    ]


def test_a_plan_of_another_size_is_refused() -> None:
    """With both numbers."""
    with pytest.raises(ValueError, match=r"4 ranks.*there are 3"):
        check_runs(Plan(bucket=64, replicas=2, fsdp=2), 3)


def test_small_batches_of_several_jobs_do_not_all_begin_at_one_rank() -> None:
    """Three jobs of one sequence over two ranks: at every step each rank has one or two of them,
    and over two steps each has three."""
    parts = [[Part(rank, 2, number=number) for number in range(3)] for rank in range(2)]
    taken = [
        [sum(part.own([7], first=step)[0] for part in own) for own in parts] for step in (0, 1)
    ]
    assert sorted(taken) == [[1, 2], [2, 1]]
    # Without their numbers all three would be on one.
    alike = [Part(0, 2) for _ in range(3)]
    assert [sum(part.own([7], first=step)[0] for part in alike) for step in (0, 1)] == [3, 0]
