"""Attention of a CPU, timed: both ways are compared with double precision first."""

import pytest
import torch
from support.native import require_native_attention


@pytest.fixture(autouse=True)
def few_and_small(load_script, monkeypatch):
    require_native_attention()
    script = load_script("cpu_attention")
    small = {name: case for name, case in script.CASES.items() if sum(case.lengths) < 2000}
    assert len(small) >= 3
    monkeypatch.setattr(script, "CASES", small)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_both_ways_are_right_and_timed(run_script) -> None:
    found = run_script("cpu_attention", "--rounds", "1")
    assert found["complete"]
    for case in found["cases"].values():
        assert case["right"] and set(case["both_ms"]) == {"C", "torch"}
        assert all(0 < each < 10_000 for each in case["ms"].values())


def test_a_way_that_is_wrong_is_told(run_script, load_script, monkeypatch) -> None:
    """One per cent in the values."""
    script = load_script("cpu_attention")
    right = script.native_attention

    def wrong(q, k, v, *others, **options):
        return right(q, k, 1.01 * v, *others, **options)

    monkeypatch.setattr(script, "native_attention", wrong)
    found = run_script("cpu_attention", "--rounds", "1")
    assert not any(case["right"] for case in found["cases"].values())
