"""What `gpu_in_layer.py` makes of a profile. It profiles GPUs alone."""

from types import ModuleType

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install '.[test]'")

NAMES = ("shrink_kernel", "nvjet_sm90_tst", "sum_into_slots_kernel", "shrink_kernel", "Memset")


@pytest.fixture
def module(load_script) -> ModuleType:
    return load_script("gpu_in_layer")


def spans(module: ModuleType, replays: int) -> list:
    """A replay takes a hundred microseconds; kernel i of replay k takes i + k."""
    return [
        module.Span(name, 100.0 * k + 10 * i, 100.0 * k + 11 * i + k)
        for k in range(replays)
        for i, name in enumerate(NAMES)
    ]


def test_each_kernel_has_the_median_of_its_own_place(module: ModuleType) -> None:
    """Not of all of its name, and whatever order they are told in."""
    kernels = module.in_order(list(reversed(spans(module, 3))), 3)
    assert kernels == [
        ("shrink", 1.0), ("cublas", 2.0), ("sum_into_slots", 3.0), ("shrink", 4.0), ("other", 5.0)
    ]  # fmt: skip
    assert module.by_kind(kernels) == {
        "shrink": 5.0, "other": 5.0, "sum_into_slots": 3.0, "cublas": 2.0
    }  # fmt: skip


@pytest.mark.parametrize("lost", [0, 7])
def test_replays_that_are_not_alike_are_refused(module: ModuleType, lost: int) -> None:
    found = spans(module, 3)
    del found[lost]
    with pytest.raises(ValueError, match="not 3 times the same"):
        module.in_order(found, 3)
