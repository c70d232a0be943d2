"""Over-length rows: what is kept, whatever the row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.core.errors import DataError
from tlora.core.sequence import IGNORED, TokenSequence
from tlora.data.lengths import fit


def sequence(trained: list[bool]) -> TokenSequence:
    ids = np.arange(len(trained), dtype=np.int32)
    return TokenSequence(ids, np.where(trained, ids, np.int32(IGNORED)), "rows.jsonl:7")


def spread(prompt: int, answer: int, rest: int = 0) -> TokenSequence:
    return sequence([False] * prompt + [True] * answer + [False] * rest)


def kept(row: TokenSequence, max_length: int) -> list[int]:
    cut = fit(row, max_length, "truncate")
    assert cut is not None
    return cut.input_ids.tolist()


rows = st.lists(st.booleans(), min_size=2, max_size=60).filter(lambda trained: any(trained[1:]))


@given(rows, st.integers(2, 70))
def test_a_cut_row_is_one_run_of_full_length_with_a_target(trained, max_length):
    row = sequence(trained)
    cut = fit(row, max_length, "truncate")
    assert cut is not None
    assert len(cut) == min(len(row), max_length)
    assert cut.num_targets >= 1
    start = int(cut.input_ids[0])
    assert cut.input_ids.tolist() == list(range(start, start + len(cut)))
    assert (cut.labels == row.labels[start : start + len(cut)]).all()
    assert cut.origin == row.origin


@given(rows, st.integers(2, 70))
def test_all_targets_stay_where_they_fit_with_a_token_of_context(trained, max_length):
    row = sequence(trained)
    cut = fit(row, max_length, "truncate")
    assert cut is not None
    targets = np.flatnonzero(row.labels[1:] != IGNORED) + 1
    if targets[-1] - targets[0] + 2 <= max_length:
        assert cut.num_targets == row.num_targets
    else:
        first = int(targets[0])
        assert first in cut.input_ids[1:], "the first target has context"
        context = first - int(cut.input_ids[0])
        assert context == min(first, max_length // 2)


def test_the_prompt_is_cut_from_the_left():
    assert kept(spread(prompt=6, answer=3), 5) == [4, 5, 6, 7, 8]


def test_what_follows_the_answer_goes_before_the_answer_does():
    assert kept(spread(prompt=2, answer=2, rest=6), 4) == [1, 2, 3, 4]


def test_a_long_answer_is_cut_at_its_end_and_keeps_its_question():
    assert kept(spread(prompt=2, answer=8), 6) == [0, 1, 2, 3, 4, 5]
    assert kept(spread(prompt=8, answer=8), 6) == [5, 6, 7, 8, 9, 10]


def test_short_rows_are_left_alone_by_every_policy():
    row = spread(prompt=2, answer=2)
    for policy in ("truncate", "drop", "raise"):
        assert fit(row, 4, policy) is row


def test_drop_leaves_out_and_raise_names_the_row():
    row = spread(prompt=2, answer=3)
    assert fit(row, 4, "drop") is None
    with pytest.raises(
        DataError, match=r"^rows.jsonl:7: the row has 5 tokens, more than .* 4"
    ) as caught:
        fit(row, 4, "raise")
    assert (caught.value.path, caught.value.line) == ("rows.jsonl", 7)
