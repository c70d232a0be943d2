"""What the control element means."""

import pytest

from tlora.parallel.lock_step import Pass, Standing, Wish, encoded, judge


def agreed(*wishes: Wish, last: Pass | None = None):
    """As MAX over ranks makes it."""
    reduced = [max(each) for each in zip(*map(encoded, wishes), strict=True)]
    return judge(reduced, last, coming=len(wishes[0].away))


def test_all_go_on_until_nobody_has_work() -> None:
    """One rank with a job keeps the others."""
    assert not agreed(Wish(), Wish(alive=True)).over
    assert agreed(Wish(), Wish()).over


def test_one_rank_stops_all() -> None:
    """Whatever the others have to do."""
    assert agreed(Wish(alive=True), Wish(alive=True, stop=True)).over


def test_passes_take_turns_where_ranks_want_different_ones() -> None:
    """So that no job waits for ever."""
    wishes = (Wish(alive=True, rows=(64, 0)), Wish(alive=True, rows=(0, 128)))
    first = agreed(*wishes)
    second = agreed(*wishes, last=first.kind)
    assert {first.kind, second.kind} == {Pass.FORWARD, Pass.TRAIN}
    assert {first.kind: first.rows, second.kind: second.rows} == {
        Pass.FORWARD: 64,
        Pass.TRAIN: 128,
    }


def test_all_take_the_size_of_the_rank_that_measures() -> None:
    """And it hears of what did not fit elsewhere; without one each keeps its own."""
    verdict = agreed(Wish(alive=True, budget=512), Wish(alive=True, unfit_rows=768))
    assert (verdict.budget, verdict.unfit_rows) == (512, 768)
    assert agreed(Wish(alive=True), Wish(alive=True)).budget == 0


def test_nothing_runs_where_nobody_wants_anything() -> None:
    """Steps may be due all the same."""
    assert agreed(Wish(alive=True), Wish(alive=True)).kind is None


@pytest.mark.parametrize(
    ("one", "other", "verdict"),
    [
        (Standing.OVER, Standing.BUSY, Standing.BUSY),
        (Standing.OVER, Standing.LEAVE, Standing.LEAVE),
        (Standing.READY, Standing.READY, Standing.READY),
        (Standing.READY, Standing.BUSY, Standing.BUSY),
        (Standing.BUSY, Standing.REPLAY, Standing.REPLAY),
        (Standing.REPLAY, Standing.LEAVE, Standing.LEAVE),
    ],
)
def test_the_worst_standing_of_a_job_counts(one, other, verdict) -> None:
    """A step only if all are ready, an end only if all have come to it; a failure on one rank is
    one on all."""
    wishes = [Wish(alive=True, standings=(each, Standing.BUSY)) for each in (one, other)]
    assert agreed(*wishes).standings == (verdict, Standing.BUSY)


def test_a_job_on_its_way_is_here_when_no_rank_waits_for_it() -> None:
    """Whoever comes first; jobs that are attached are told apart from it."""
    wishes = [
        Wish(alive=True, standings=(Standing.READY,), away=(True, False, True)),
        Wish(alive=True, standings=(Standing.OVER,), away=(False, False, True)),
    ]
    verdict = agreed(*wishes)
    assert verdict.away == (True, False, True)
    assert verdict.standings == (Standing.READY,)
    assert agreed(Wish(alive=True), Wish()).away == ()
