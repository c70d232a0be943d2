"""A packed nano-batch: sequences in order, each with its own positions, targets and rows."""

import numpy as np
import pytest
import torch

from tlora.core.sequence import IGNORED, TokenSequence
from tlora.model.packing import PackedBatch, PackedSegment, Share, pack


def sequence(tokens: list[int], labels: list[int] | None = None) -> TokenSequence:
    ids = np.array(tokens, dtype=np.int32)
    return TokenSequence(ids, ids if labels is None else np.array(labels, dtype=np.int32))


X = IGNORED
SHARES = [
    Share(
        job="first",
        sequences=[sequence([11, 12, 13, 14], [X, X, 13, 14]), sequence([21, 22], [21, 22])],
        row_offsets=[100, 7],
        loss_scales=[0.5, 0.25],
        key=99,
    ),
    Share(job="second", sequences=[sequence([31, 32, 33])], row_offsets=[0], loss_scales=[2.0]),
]


def packed() -> PackedBatch:
    return pack(SHARES, 12)


def test_tokens_lie_in_order_with_padding_at_the_tail() -> None:
    """Jobs after each other, sequences after each other, zeros once at the end."""
    batch = packed()
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 21, 22, 31, 32, 33, 0, 0, 0]]
    assert batch.lengths == [4, 2, 3]
    assert (batch.num_rows, batch.num_tokens) == (12, 9)


def test_positions_are_counted_from_each_sequences_start() -> None:
    """Not from the row's, nor the job's."""
    assert packed().position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 0, 0, 0]]


def test_rows_count_from_the_place_in_the_jobs_own_batch() -> None:
    """They key dropout, so they do not know where in the nano-batch a sequence lies."""
    batch = packed()
    assert batch.rows.tolist() == [100, 101, 102, 103, 7, 8, 0, 1, 2, 0, 0, 0]
    assert batch.rows.dtype == torch.int32
    alone = pack([Share("first", SHARES[0].sequences[1:], [7], [0.25], key=99)], 12)
    assert alone.rows[:2].tolist() == batch.rows[4:6].tolist()


def test_a_row_predicts_the_next_token_of_its_own_sequence() -> None:
    """The shift by one: no target for a first token, none across a boundary, none for padding."""
    batch = packed()
    assert batch.predicting.tolist() == [1, 2, 4, 6, 7]
    assert batch.targets.tolist() == [13, 14, 22, 32, 33]


def test_every_target_counts_by_its_sequences_scale() -> None:
    """In float32, one number per target."""
    batch = packed()
    assert batch.loss_scales.tolist() == [0.5, 0.5, 0.25, 2.0, 2.0]
    assert batch.loss_scales.dtype == torch.float32


def test_segments_say_which_rows_and_targets_are_whose() -> None:
    """Per job contiguous, with the ends and the numbers of targets of its sequences."""
    assert packed().segments == [
        PackedSegment("first", 0, 6, 99, slice(0, 3), [4, 6], [2, 1]),
        PackedSegment("second", 6, 9, 0, slice(3, 5), [9], [2]),
    ]


def test_targets_agree_with_the_labels_of_random_shares() -> None:
    """Against the definition, token by token: labels[i] is predicted at the row of token i - 1."""
    random = np.random.default_rng(0)
    shares = []
    for job in range(5):
        sequences = []
        for length in random.integers(1, 9, size=job):
            ids = random.integers(1, 1000, size=length).astype(np.int32)
            labels = np.where(random.random(length) < 0.5, ids, IGNORED).astype(np.int32)
            sequences.append(TokenSequence(ids, labels))
        offsets = np.cumsum([0, *map(len, sequences)])[:-1].tolist()
        shares.append(Share(f"job {job}", sequences, offsets, [1.0 / (job + 1)] * job, key=job))
    batch = pack(shares, 128)
    wanted, start = [], 0
    for share in shares:
        for item, scale in zip(share.sequences, share.loss_scales, strict=True):
            for i, label in enumerate(item.labels.tolist()):
                if i > 0 and label != IGNORED:
                    wanted.append((start + i - 1, label, np.float32(scale)))
            start += len(item)
    found = zip(batch.predicting.tolist(), batch.targets.tolist(), batch.loss_scales, strict=True)
    assert [(row, target, np.float32(scale)) for row, target, scale in found] == wanted
    for segment, share in zip(batch.segments, shares, strict=True):
        assert segment.sequence_targets == [item.num_targets for item in share.sequences]
        assert segment.targets.stop - segment.targets.start == sum(segment.sequence_targets)
        assert segment.stop - segment.start == sum(map(len, share.sequences))


def test_a_share_without_sequences_is_an_empty_segment() -> None:
    """A job with no tokens in a nano-batch is not an error."""
    batch = pack([Share("idle", [], [], []), SHARES[1]], 4)
    assert batch.segments[0] == PackedSegment("idle", 0, 0, 0, slice(0, 0), [], [])
    assert (batch.segments[1].start, batch.segments[1].stop) == (0, 3)


def test_one_token_has_no_target() -> None:
    """Nothing stands before it, whatever its label."""
    batch = pack([Share("one", [sequence([5])], [0], [1.0])], 1)
    assert (batch.targets.numel(), batch.num_tokens) == (0, 1)


def test_nothing_at_all_packs_to_padding() -> None:
    """The types are those of any batch."""
    batch = pack([], 8)
    assert batch.input_ids.tolist() == [[0] * 8]
    kinds = (batch.predicting.dtype, batch.targets.dtype, batch.loss_scales.dtype)
    assert kinds == (torch.int64, torch.int64, torch.float32)


def test_more_tokens_than_rows_are_refused() -> None:
    """By one token too many."""
    with pytest.raises(AssertionError, match="9 tokens do not fit in 8 rows"):
        pack(SHARES, 8)
    assert pack(SHARES, 9).num_tokens == 9


def test_packing_leaves_the_sequences_alone() -> None:
    """They are shared with the data cache."""
    before = [(s.input_ids.copy(), s.labels.copy()) for share in SHARES for s in share.sequences]
    batch = packed()
    batch.input_ids.fill_(-1)
    batch.targets.fill_(-1)
    after = [(s.input_ids, s.labels) for share in SHARES for s in share.sequences]
    assert all(map(np.array_equal, sum(before, ()), sum(after, ())))
