"""Adapters of a CPU, timed: every way is compared with the reference first."""

import pytest
import torch


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_way_is_right_and_timed(run_script) -> None:
    found = run_script("cpu_adapters", "--tokens", "96", "--dropout", "0.2", "--rounds", "2")
    assert found["complete"] and found["settings"]["dropout"] == 0.2
    for group in found["groups"].values():
        assert group["right"]
        assert all(0 < each < 1000 for each in group["ms"].values())
        assert set(group["both_ms"]) >= {"plain", "frozen", "MKL"}


def test_a_way_that_is_wrong_is_told(run_script, load_script, monkeypatch) -> None:
    """One per cent in S."""
    cpu = load_script("cpu_adapters").cpu
    forward = cpu.add_forward

    def wrong(y, s, x, *others, **options):
        return forward(y, s, 1.01 * x, *others, **options)

    monkeypatch.setattr(cpu, "add_forward", wrong)
    found = run_script("cpu_adapters", "--tokens", "64", "--rounds", "2")
    assert not any(group["right"] for group in found["groups"].values())
