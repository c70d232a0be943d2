"""Who trained where: intervals out of comings and goings."""

from tlora.runtime.placement import Stay, stays
from tlora.runtime.run_log import Attendance


def came(at: float, job: str, device: int) -> Attendance:
    return Attendance(at, job, True, device)


def went(at: float, job: str, device: int) -> Attendance:
    return Attendance(at, job, False, device)


def test_a_job_that_moves_has_a_stay_on_each_device() -> None:
    """And whoever is still there stays until the end."""
    found = stays(
        [came(0.0, "a", 0), came(1.0, "b", 0), went(2.0, "a", 0), came(2.5, "a", 1)], until=4.0
    )
    assert found == [
        Stay("a", 0, 0.0, 2.0, lane=0),
        Stay("b", 0, 1.0, 4.0, lane=1),
        Stay("a", 1, 2.5, 4.0, lane=0),
    ]


def test_a_lane_is_used_again_once_it_is_free() -> None:
    found = stays(
        [came(0.0, "a", 0), came(0.0, "b", 0), went(1.0, "a", 0), came(1.0, "c", 0)], until=2.0
    )
    assert {stay.job: stay.lane for stay in found} == {"a": 0, "b": 1, "c": 0}


def test_a_job_that_was_lost_with_its_device_left_when_it_came_again() -> None:
    """Nobody said that it went."""
    found = stays([came(0.0, "a", 0), came(3.0, "a", 1)], until=5.0)
    assert [(stay.device, stay.began, stay.ended) for stay in found] == [(0, 0, 3), (1, 3, 5)]


def test_a_run_on_one_device_has_no_stays() -> None:
    assert stays([Attendance(0.0, "a", True), Attendance(1.0, "a", False)], until=1.0) == []


def test_a_job_that_spans_ranks_stays_on_each() -> None:
    """From its coming to its going, beside those that are on one."""
    found = stays(
        [
            Attendance(0.0, "wide", True, 0, ranks=3),
            Attendance(1.0, "one", True, 1),
            Attendance(4.0, "wide", False, 0),
        ],
        until=9.0,
    )
    assert [(each.job, each.device, each.began, each.ended) for each in found] == [
        ("wide", 0, 0.0, 4.0),
        ("wide", 1, 0.0, 4.0),
        ("one", 1, 1.0, 9.0),
        ("wide", 2, 0.0, 4.0),
    ]


def test_a_lost_group_ends_all_stays() -> None:
    """Those that come again begin anew, and with fewer ranks."""
    found = stays(
        [Attendance(0.0, "wide", True, 0, ranks=2), Attendance(5.0, "wide", True, 0)],
        until=8.0,
        lost=[3.0],
    )
    assert [(each.device, each.began, each.ended) for each in found] == [
        (0, 0.0, 3.0),
        (0, 5.0, 8.0),
        (1, 0.0, 3.0),
    ]
    assert [each.ended for each in stays([Attendance(0.0, "j", True, 0)], 8.0, [3.0])] == [3.0]
