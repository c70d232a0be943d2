"""Jobs that span ranks besides supervised steps: preference pairs, and leaving by agreement."""

import pytest
from support import rank_jobs, rank_work
from support.curves import difference
from support.rank_jobs import Told
from support.ranks import Ranks

ROUNDING = 5e-6


def test_preference_pairs_span_ranks(ranks: Ranks, checkpoint: str) -> None:
    """Each rank makes the references of its own pairs; losses, adapters and held-out losses are
    those of one process, in shards and beside a job on one rank."""
    alone: Told = rank_work.train_pairs()
    told: list[Told] = ranks.call(rank_work.train_pairs, 2, path=checkpoint)
    curves = {name: curve for each in told for name, curve in each.curves.items()}
    assert set(curves) == {"pairs", "smoothed"}
    for name, curve in curves.items():
        assert difference(curve, alone.curves[name]).within(ROUNDING), name
    assert told[0].curves["pairs"].losses == told[1].curves["pairs"].losses
    for each in told:
        for name, losses in each.evaluations.items():
            assert losses == pytest.approx(alone.evaluations[name], rel=ROUNDING), name


@pytest.mark.parametrize("step", [3, rank_jobs.STEPS["dropped"]], ids=["midway", "at its end"])
def test_a_job_that_pauses_on_one_rank_pauses_on_all(step: int, ranks: Ranks, alone: Told) -> None:
    """At the same step, with the reason, though the other rank would have ended it by then; its
    neighbour goes on as alone."""
    told = ranks.call(rank_work.pause_on_one_rank, 2, step=step)
    assert [each[:3] for each in told] == 2 * [("paused", "the disk is full (rank 0)", step)]
    for *_, curves in told:
        assert difference(curves["one"], alone.curves["one"]).within(ROUNDING)
