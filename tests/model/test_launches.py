"""When a shape of nano-batch is worth capturing."""

from tlora.model.launches import Launches


def test_a_shape_that_waits_for_its_launches_is_captured() -> None:
    """The host takes as long as the device, which has nothing else to wait for."""
    launches = Launches()
    for _ in range(4):
        assert not launches.bound
        launches.add(host=0.10, device=0.11)
    assert launches.bound


def test_a_shape_that_keeps_the_device_busy_is_not() -> None:
    launches = Launches()
    for _ in range(4):
        launches.add(host=0.10, device=0.48)
    assert launches.decided
    assert not launches.bound


def test_the_runs_that_compile_do_not_count() -> None:
    """They take the host a minute."""
    launches = Launches()
    for host in (60.0, 20.0, 0.1, 0.1):
        launches.add(host, device=0.5 if host < 1 else host)
    assert launches.decided
    assert not launches.bound


def test_a_smaller_shape_is_captured_as_soon_as_it_is_compiled() -> None:
    """It launches as much, and the device is through sooner. Not so a larger one, or one of another
    kind."""
    shapes = [Launches(trains=True, rows=512, seconds=[(0.10, 0.11)] * 2)]
    for trains, rows, bound in [(True, 256, True), (True, 1024, False), (False, 256, False)]:
        other = Launches(trains=trains, rows=rows)
        for _ in range(2):
            assert not other.bound_among(shapes)
            other.add(host=9.0, device=9.1)
        assert other.bound_among(shapes) == bound
    slow = Launches(trains=True, rows=256, seconds=[(0.0, 1.0)] * 2)
    assert not slow.bound_among(shapes), "its own runs count more"
