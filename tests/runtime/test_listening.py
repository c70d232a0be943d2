"""Who has gone silent, and when nobody listened."""

from tlora.runtime.listening import AWAY_S, LastHeard, Listener


def test_only_a_long_time_between_two_looks_is_absence() -> None:
    times = iter([0.0, 0.25, 0.25 + AWAY_S, 60.0, 60.25])
    listener = Listener(lambda: next(times))
    assert [listener.away_s() for _ in range(4)] == [0.0, 0.0, 60.0 - 0.25 - AWAY_S, 0.0]


def test_time_in_which_nobody_listened_is_no_silence() -> None:
    """Ctrl-Z, and fg a minute later."""
    times = iter([0.0, 2.0, 62.0, 65.0, 66.0, 67.0])
    heard = LastHeard(lambda: next(times))
    assert [heard.silent_s(away) for away in (0.0, 60.0, 0.0)] == [2.0, 2.0, 5.0]
    heard.hear()
    assert heard.silent_s(0.0) == 1.0
