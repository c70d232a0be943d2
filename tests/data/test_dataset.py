"""A job's view of a cache: which rows, how long, and what is held out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.core.errors import DataError
from tlora.core.sequence import IGNORED
from tlora.data import cache as cache_module
from tlora.data.cache import CacheWriter, TokenCache, open_cache
from tlora.data.dataset import TokenDataset, split_rows
from tlora.data.rows import Origin
from tlora.data.tokenise import Encoded

LENGTHS = [3, 12, 5, 8, 20]


@pytest.fixture
def cache(tmp_path) -> TokenCache:
    """Rows of these lengths, the second half of each trained."""
    with CacheWriter(tmp_path / "key", own_labels=False, source_names=("rows.jsonl",)) as writer:
        for line, length in enumerate(LENGTHS, start=1):
            ids = np.arange(length, dtype=np.int32)
            labels = np.where(ids >= length // 2, ids, np.int32(IGNORED))
            writer.add(Encoded(ids, labels, Origin("rows.jsonl", line)))
        writer.publish(detected="text", rendering="plain")
    cache = open_cache(tmp_path / "key", ("rows.jsonl",))
    assert cache is not None
    return cache


def view(cache: TokenCache, policy: str, max_length: int = 8) -> TokenDataset:
    index = np.arange(len(cache))
    return TokenDataset(cache, index, max_length=max_length, over_length=policy)  # type: ignore[arg-type]


def test_lengths_and_targets_are_known_without_reading_the_rows(cache):
    for policy in ("truncate", "drop"):
        dataset = view(cache, policy)
        assert dataset.lengths.tolist() == [len(dataset[i]) for i in range(len(dataset))]
        targets = [dataset[i].num_targets for i in range(len(dataset))]
        assert dataset.num_targets().tolist() == targets


@pytest.mark.parametrize("own_labels", [False, True])
@pytest.mark.parametrize("stretch", [1, 100, 1 << 20])
def test_targets_of_rows_that_are_cut_are_those_of_the_rows_as_read(
    own_labels, stretch, tmp_path, monkeypatch
):
    """Long and short, marked anywhere but nowhere, in any order and however many at once."""
    monkeypatch.setattr(cache_module, "STRETCH", stretch)
    random = np.random.default_rng(0)
    with CacheWriter(tmp_path / "key", own_labels=own_labels, source_names=("a",)) as writer:
        for line in range(300):
            ids = np.arange(random.integers(2, 40), dtype=np.int32)
            marked = random.random(len(ids)) < random.choice([0.02, 0.3, 0.9])
            marked[random.integers(1, len(ids))] = True
            labels = np.where(marked, ids, np.int32(IGNORED))
            writer.add(Encoded(ids, labels, Origin("a", line)))
        writer.publish(detected="text", rendering="plain")
    cache = open_cache(tmp_path / "key", ("a",))
    assert cache is not None
    index = random.permutation(len(cache))[:250]
    for max_length in (2, 3, 9, 25):
        cut = TokenDataset(cache, index, max_length=max_length, over_length="truncate")
        targets = [cut[i].num_targets for i in range(len(cut))]
        assert cut.num_targets().tolist() == targets
        assert cut.num_truncated > 50


def test_truncated_and_dropped_rows_are_counted(cache):
    cut, dropped = view(cache, "truncate"), view(cache, "drop")
    assert (len(cut), cut.num_truncated, cut.num_dropped) == (5, 2, 0)
    assert (len(dropped), dropped.num_truncated, dropped.num_dropped) == (3, 0, 2)
    assert dropped[2].origin == "rows.jsonl:4"


def test_raise_names_the_first_row_that_is_too_long(cache):
    with pytest.raises(DataError, match=r"rows.jsonl:2: the row has 12 tokens"):
        view(cache, "raise")
    assert len(view(cache, "raise", max_length=20)) == 5


@given(
    n=st.integers(2, 200), share=st.floats(0.01, 0.9) | st.integers(0, 1), seed=st.integers(0, 9)
)
def test_a_split_parts_all_rows_and_depends_on_the_seed_alone(n, share, seed):
    try:
        split = split_rows(n, share, seed)
    except DataError:
        assert not isinstance(share, int)
        assert round(n * share) >= n
        return
    held_out = share if isinstance(share, int) else max(1, round(n * share))
    assert len(split.evaluation) == held_out
    both = np.concatenate((split.train, split.evaluation))
    assert sorted(both.tolist()) == list(range(n))
    assert split_rows(n, share, seed).evaluation.tolist() == split.evaluation.tolist()


def test_seeds_hold_out_different_rows():
    held_out = {tuple(split_rows(100, 10, seed).evaluation.tolist()) for seed in range(5)}
    assert len(held_out) == 5


def test_a_split_that_leaves_nothing_is_refused():
    with pytest.raises(DataError, match=r"eval.split 5 would hold out 5 of 5 rows"):
        split_rows(5, 5, 0)
    with pytest.raises(DataError, match="leave none"):
        split_rows(1, 0.1, 0)
