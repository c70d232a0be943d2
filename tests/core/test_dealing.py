"""Which rank a job lives on."""

from hypothesis import given
from hypothesis import strategies as st
from support.scheduling import request

from tlora.core.dealing import Load, deal_jobs, least_loaded, load_of


def test_jobs_are_dealt_by_tokens_and_rank() -> None:
    """The heavy one alone; a wide adapter counts more than a narrow one of the same tokens."""
    loads = [Load("heavy", 100, 8), Load("a", 40, 8), Load("b", 30, 8), Load("c", 20, 8)]
    places = deal_jobs(loads, 2)
    assert [name for name, rank in places.items() if rank == places["heavy"]] == ["heavy"]
    wide = [Load("wide", 100, 1000), Load("a", 100, 1), Load("b", 95, 1)]
    places = deal_jobs(wide, 2)
    assert places["a"] == places["b"] != places["wide"]
    flat = deal_jobs(wide, 2, rank_cost=0.0)
    assert flat["wide"] != flat["a"] and flat["b"] in (0, 1)


def test_what_is_left_counts() -> None:
    """A job half through has half of its work; one beyond its end has none."""
    job = request("job", batch=4, steps=10)
    assert load_of(job, step=5).tokens == load_of(job).tokens / 2
    assert load_of(job, step=11).tokens == 0


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=40), st.integers(1, 16))
def test_jobs_are_dealt_evenly(work: list[float], ranks: int) -> None:
    """No rank has more than the mean and one job."""
    places = deal_jobs([Load(f"j{at}", much, 8) for at, much in enumerate(work)], ranks)
    loads = [0.0] * ranks
    for at, much in enumerate(work):
        loads[places[f"j{at}"]] += much
    assert max(loads) <= sum(work) / ranks + max(work) + 1e-9


def test_a_job_more_goes_to_whoever_has_the_least_work() -> None:
    """By tokens and rank, not by the number of jobs; an empty rank first."""
    loads = [Load("large", 100, 8), Load("a", 30, 8), Load("b", 30, 8)]
    places = {"large": 0, "a": 1, "b": 1}
    assert least_loaded(loads, places, 2) == 1
    assert least_loaded(loads, places, 3) == 2
    assert least_loaded([*loads, Load("wide", 30, 1000)], {**places, "wide": 1}, 2) == 0
