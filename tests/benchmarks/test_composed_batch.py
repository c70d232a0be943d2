"""Nano-batches for benchmarks of kernels: those that the engine makes."""

from collections import Counter
from types import ModuleType

import pytest

RANKS = (8, 64, 16, 32) * 8


@pytest.fixture
def module(load_script) -> ModuleType:
    return load_script("composed_batch")


def test_thirty_two_jobs_come_a_few_at_a_time(module: ModuleType) -> None:
    """Batches of two thousand tokens: eight turns fill 8,192. Whoever begins a batch has no
    gradient yet; two turns of 1,024 make one, so that half of them do."""
    served: Counter[int] = Counter()
    begun = total = 0
    for number in range(40):
        parts = module.composed_batch(RANKS, 8192, lengths=[512], batches=[4], number=number)
        assert [part.tokens for part in parts] == [1024] * 8
        assert [part.job for part in parts] == sorted({part.job for part in parts})
        served.update(part.job for part in parts)
        begun += sum(part.begins for part in parts)
        total += len(parts)
    assert len(served) == len(RANKS) and max(served.values()) - min(served.values()) <= 2
    assert begun == total / 2


def test_jobs_of_small_batches_are_all_there(module: ModuleType) -> None:
    """As long as they fit; all of their batches begin and end in it."""
    parts = module.composed_batch(RANKS, 8192, lengths=[200], batches=[1], number=3)
    assert [(part.job, part.tokens, part.begins) for part in parts] == [
        (job, 200, True) for job in range(32)
    ]
