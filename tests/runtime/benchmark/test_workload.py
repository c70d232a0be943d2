"""The same work for every arm and on every machine."""

import numpy as np
import pytest

from tlora.core.sequence import TokenSequence
from tlora.runtime.benchmark.workload import (
    Done,
    in_batches_by_length,
    in_full_batches,
    new_workload,
)

ASKED = {
    "num_jobs": 5,
    "ranks": (4, 8),
    "batches": (1, 2, 4),
    "lengths": (7, 20, 31),
    "steps": 3,
    "dropout": 0.1,
    "vocabulary": 50,
}


def rows(*lengths: int) -> list[TokenSequence]:
    return [TokenSequence(np.arange(n, dtype=np.int32), np.arange(n)) for n in lengths]


def test_ranks_and_batches_go_round_and_every_row_is_passed_once() -> None:
    """Rows are steps x batch, of lengths from the list."""
    work = new_workload(**ASKED)
    assert [job.lora.r for job in work.jobs] == [4, 8, 4, 8, 4]
    assert [job.train.batch_size for job in work.jobs] == [1, 2, 4, 1, 2]
    assert [len(work.rows[job.name]) for job in work.jobs] == [3, 6, 12, 3, 6]
    assert {len(row) for row in work.sequences} <= {7, 20, 31}
    assert work.of(work.jobs) == Done(work.tokens, 30, 15)


def test_the_work_is_the_same_every_time() -> None:
    """Tokens and lengths; another vocabulary gives others."""
    first, second = new_workload(**ASKED), new_workload(**ASKED)
    other = new_workload(**{**ASKED, "vocabulary": 60})
    ids = [np.concatenate([r.input_ids for r in w.sequences]) for w in (first, second, other)]
    assert np.array_equal(ids[0], ids[1])
    assert not np.array_equal(ids[0], ids[2][: len(ids[0])])


@pytest.mark.parametrize("cut", [in_batches_by_length, in_full_batches])
def test_batches_hold_every_row_once_and_keep_to_the_budget(cut) -> None:
    """Padded to the longest in the one case, in a row in the other; a longer row goes alone."""
    given = rows(3, 9, 4, 4, 12, 5, 3, 30)
    batches = cut(given, 12)
    assert sorted(len(row) for batch in batches for row in batch) == sorted(map(len, given))
    assert {id(row) for batch in batches for row in batch} == {id(row) for row in given}
    for batch in batches:
        longest = max(map(len, batch))
        size = longest * len(batch) if cut is in_batches_by_length else sum(map(len, batch))
        assert size <= 12 or len(batch) == 1
