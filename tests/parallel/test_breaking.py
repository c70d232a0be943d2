"""What goes wrong on one rank: nobody hangs, whoever is concerned runs its batch again or fails,
and everybody else trains as if nothing had happened."""

import pytest
from support import rank_work
from support.curves import difference
from support.rank_jobs import Told
from support.ranks import Ranks

from tlora.core.plan import Plan

ROUNDING = 5e-6
JOBS = ("one", "odd", "dropped", "wide")


def same_as_alone(told: list[Told], alone: Told, names: tuple[str, ...] = JOBS) -> bool:
    curves = {name: curve for each in told for name, curve in each.curves.items()}
    return all(difference(curves[name], alone.curves[name]).within(ROUNDING) for name in names)


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("kept", [0, 1])
def test_a_pass_that_breaks_off_in_shards_holds_nobody_up(
    place: str, kept: int, ranks: Ranks, checkpoint: str, alone: Told
) -> None:
    """In the middle of the layers, with a job that spans both ranks: its batch is run again on
    both, and all end as they would alone."""
    plan = Plan(bucket=192, fsdp=2, kept_layers=kept, adapters="mixed", spread=("wide",))
    told = ranks.call(
        rank_work.train_in_group,
        2,
        plan=plan,
        path=checkpoint,
        first=JOBS,
        break_pass=(1, 9, place),
    )
    assert any("broken on purpose" in error for error in told[1].errors)
    assert not told[0].errors and not any(each.failed for each in told)
    assert same_as_alone(told, alone)


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("fsdp", [1, 2])
def test_a_rank_without_memory_goes_on_with_smaller_nano_batches(
    place: str, fsdp: int, ranks: Ranks, checkpoint: str, alone: Told
) -> None:
    """That rank alone; every job, on it or beside it, ends as it would alone."""
    plan = Plan(bucket=192, replicas=2 // fsdp, fsdp=fsdp, adapters="mixed", spread=("wide",))
    told = ranks.call(
        rank_work.train_in_group,
        2,
        plan=plan,
        path=checkpoint,
        first=JOBS,
        break_pass=(1, 4, place),
        fault="memory",
    )
    assert told[1].errors == ["out of memory: out of memory on purpose"]
    assert [each.budget for each in told] == [192, 96]
    assert not told[0].errors and not any(each.failed for each in told)
    assert same_as_alone(told, alone)


def test_layers_that_stay_gathered_make_room_first(
    ranks: Ranks, checkpoint: str, alone: Told
) -> None:
    """On all ranks, where one is out of memory: half of them, and nano-batches stay as large."""
    plan = Plan(bucket=192, fsdp=2, kept_layers=2, adapters="mixed", spread=("wide",))
    told = ranks.call(
        rank_work.train_in_group,
        2,
        plan=plan,
        path=checkpoint,
        first=JOBS,
        break_pass=(1, 4, "backward"),
        fault="memory",
    )
    assert [each.kept_layers for each in told] == [1, 1]
    assert [each.budget for each in told] == [192, 192]
    assert told[1].breaks == 1 and not any(each.failed for each in told)
    assert same_as_alone(told, alone)


@pytest.mark.parametrize(("job", "place"), [("odd", "forward"), ("wide", "backward")])
def test_a_job_that_never_fits_fails_by_name_and_alone(
    job: str, place: str, ranks: Ranks, checkpoint: str, alone: Told
) -> None:
    """In shards, on one rank: a job of that rank, or one that spans both and so leaves both. Its
    neighbours end as they would alone."""
    plan = Plan(bucket=192, fsdp=2, adapters="mixed", spread=("wide",))
    told = ranks.call(
        rank_work.train_in_group,
        2,
        plan=plan,
        path=checkpoint,
        first=JOBS,
        break_pass=(1, 4, place),
        fault=job,
    )
    assert [set(each.failed) for each in told] == [{job} if job == "wide" else set(), {job}]
    assert "out of memory on" in told[1].failed[job]
    assert same_as_alone(told, alone, tuple(name for name in JOBS if name != job))


@pytest.mark.parametrize(
    ("fault", "kept", "left"), [("joining", 0, 0), ("joining, memory", 2, 1)], ids=["any", "memory"]
)
def test_a_pass_without_work_that_breaks_off_holds_nobody_up(
    fault: str, kept: int, left: int, ranks: Ranks, checkpoint: str, alone: Told
) -> None:
    """A rank that joins for the others' sake: there is nothing to run again. Where it was out of
    memory, layers that stay gathered are fewer on all ranks."""
    plan = Plan(bucket=192, fsdp=2, kept_layers=kept, adapters="rank_local")
    told = ranks.call(
        rank_work.train_in_group,
        2,
        plan=plan,
        path=checkpoint,
        first=("one",),
        break_pass=(1, 2, "backward"),
        fault=fault,
    )
    assert told[1].breaks == 1 and not any(each.failed for each in told)
    assert [each.kept_layers for each in told] == [left, left]
    assert same_as_alone(told, alone, ("one",))


def test_a_job_ends_on_all_ranks_though_a_pass_of_others_breaks_off(
    ranks: Ranks, alone: Told
) -> None:
    """At the very turn that all are through with it: it leaves both ranks before the next one."""
    plan = Plan(bucket=192, replicas=2, adapters="mixed", spread=("odd",))
    told = ranks.call(
        rank_work.train_in_group,
        2,
        plan=plan,
        first=JOBS,
        break_pass=(0, 0, "forward"),
        fault="ending",
    )
    assert told[0].breaks == 1 and not any(each.failed for each in told)
    assert same_as_alone(told, alone)


def test_a_pass_that_breaks_off_without_shards(ranks: Ranks, alone: Told) -> None:
    """Whole copies: the other rank does not even notice, but for the job that spans both."""
    plan = Plan(bucket=192, replicas=2)
    told = ranks.call(
        rank_work.train_in_group, 2, plan=plan, first=JOBS, break_pass=(0, 5, "backward")
    )
    assert told[0].errors and not told[1].errors
    assert same_as_alone(told, alone)


def test_a_job_that_fails_on_one_rank_fails_on_all(ranks: Ranks, alone: Told) -> None:
    """Its gradient is infinite on one rank: it leaves both, with the reason; the others go on."""
    plan = Plan(bucket=192, replicas=2)
    told = ranks.call(rank_work.train_in_group, 2, plan=plan, first=JOBS, poison=(1, 12, "dropped"))
    for each in told:
        assert set(each.failed) == {"dropped"}
        assert "gradient norm is" in each.failed["dropped"]
    assert same_as_alone(told, alone, ("one", "odd", "wide"))


def test_without_catching_up_the_others_would_wait(ranks: Ranks, checkpoint: str) -> None:
    """How many gatherings the rank that broke off had left to do."""
    missing = ranks.call(rank_work.missing_after_break, 2, path=checkpoint)
    assert missing[1] > 0 and missing[0] == 0
