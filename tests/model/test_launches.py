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
