"""Packed attention is plain softmax attention of each sequence by itself."""

import math

import pytest
import torch
from support.attention import (
    HEAD_SIZE,
    HEADS,
    LENGTHS,
    OPTIONS,
    PADDING,
    SCALE,
    errors_by_sequence,
    leaks,
    mismatches,
    plain_attention,
    results,
    sequences,
    tensors,
)
from support.comparing import TOLERANCES, same_bits

from tlora.kernels.attention import layout, packed
from tlora.kernels.attention.layout import attention_layout, plan_groups
from tlora.kernels.attention.packed import attend, visible


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    *,
    one_by_one: bool = False,
    width: int = HEADS * HEAD_SIZE,
    **options: object,
) -> torch.Tensor:
    laid_out = attention_layout(lengths, len(query), width, one_by_one=one_by_one)
    return packed.packed_attention(query, key, value, laid_out, **options)


# Right.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_packed_is_plain_attention_per_sequence(name: str, dtype: torch.dtype) -> None:
    """Output and the gradients of q, k and v, with fewer key heads than query heads."""
    inputs = tensors(dtype)
    right = results(plain_attention, inputs, dtype=torch.float64, **OPTIONS[name])
    found = results(packed_attention, inputs, **OPTIONS[name])
    # In bfloat16 scores are rounded too: 5.5e-3 was measured.
    tolerance = 1e-2 if dtype == torch.bfloat16 else None
    assert mismatches(found, right, tolerance) == []


@pytest.mark.parametrize("key_heads", [1, 3, 6])
@pytest.mark.parametrize("name", ["causal", "window", "softcap"])
def test_key_heads_are_shared_in_order(name: str, key_heads: int) -> None:
    """Query head h uses key head h // (heads / key heads), for any number of them."""
    inputs = tensors(torch.float64, key_heads)
    right = results(plain_attention, inputs, **OPTIONS[name])
    assert mismatches(results(packed_attention, inputs, **OPTIONS[name]), right) == []


@pytest.mark.parametrize("name", OPTIONS)
def test_one_by_one_gives_the_same_values(name: str) -> None:
    """Sequences of one length together or apart."""
    inputs = tensors(torch.float64)
    right = results(plain_attention, inputs, **OPTIONS[name])
    apart = results(packed_attention, inputs, one_by_one=True, **OPTIONS[name])
    assert mismatches(apart, right) == []


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({"width": 1}, [(7, 63)]),
        ({}, [(2, 63), (5, 7)]),
        ({"width": 10_000}, [(1, 63), (1, 12), (3, 7), (2, 2)]),
        ({"width": 1_000_000}, [(1, 63), (1, 12), (3, 7), (1, 2), (1, 1)]),
        ({"one_by_one": True}, [(1, 63), (1, 12), (1, 7), (1, 7), (1, 7), (1, 2), (1, 1)]),
    ],
)
def test_sequences_share_a_call_while_their_repeats_cost_less(
    options: dict, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narrow ones all, wide ones only where the lengths are equal; with `one_by_one` none."""
    seen: list[tuple[int, int]] = []

    def counting(query: torch.Tensor, *others: torch.Tensor, **options: object) -> torch.Tensor:
        seen.append((query.shape[0], query.shape[2]))
        return attend(query, *others, **options)

    monkeypatch.setattr(packed, "attend", counting)
    packed_attention(*tensors(torch.float32)[:3], LENGTHS, scale=SCALE, **options)
    assert seen == shapes


@pytest.mark.parametrize("width", [1, 100, 3_000, 10_000, 1_000_000])
def test_any_grouping_gives_the_same_values(width: int) -> None:
    """Whatever is continued to whatever length."""
    inputs = tensors(torch.float64)
    for options in OPTIONS.values():
        right = results(plain_attention, inputs, **options)
        found = results(packed_attention, inputs, width=width, **options)
        assert mismatches(found, right) == []


def test_the_repeats_of_a_group_cost_no_more_than_a_call() -> None:
    """The bound that the rule gives, and every sequence is in one group."""
    lengths = torch.randint(1, 400, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    groups = plan_groups(lengths, 128)
    assert sorted(i for group in groups for i in group) == list(range(200))
    for group in groups:
        longest = max(lengths[i] for i in group)
        assert sum(longest**2 - lengths[i] ** 2 for i in group) * 128 <= layout.CALL_COST


def test_one_by_one_gives_the_bits_of_a_lone_sequence() -> None:
    """Whatever is packed beside it: what `isolation: exact` stands on."""
    *inputs, gradient = tensors(torch.float32)
    together = sequences(results(packed_attention, (*inputs, gradient), one_by_one=True))
    parts = zip(*(tensor.split([*LENGTHS, PADDING]) for tensor in (*inputs, gradient)), strict=True)
    for length, found, part in zip(LENGTHS, together, parts, strict=False):
        alone = results(packed_attention, part, [length], one_by_one=True)
        assert all(map(same_bits, found, alone))


@pytest.mark.parametrize("window", [1, 2, 5, 9, 20])
def test_the_window_is_that_of_transformers(window: int) -> None:
    """Token i sees i - window + 1 .. i, itself included."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    theirs = sliding_window_causal_mask_function(window)
    wanted = [[bool(theirs(0, 0, q, k)) for k in torch.arange(9)] for q in torch.arange(9)]
    assert visible(9, window, torch.device("cpu")).tolist() == wanted


# Nobody else's.


@pytest.mark.parametrize("name", OPTIONS)
def test_padding_gives_zeros_and_takes_part_in_nothing(name: str) -> None:
    """NaN in every row of padding: its output and gradients are zeros, all else keeps its bits."""
    inputs = tensors(torch.float32)
    clean = results(packed_attention, inputs, **OPTIONS[name])
    for tensor in inputs:
        tensor[-PADDING:] = math.nan
    found = results(packed_attention, inputs, **OPTIONS[name])
    assert all(not value.any() for value in sequences(found)[-1])
    assert all(map(same_bits, found, clean))


def test_a_row_of_padding_alone_gives_zeros() -> None:
    """No sequence at all."""
    inputs = tensors(torch.float32)
    out = packed_attention(*inputs[:3], [], scale=SCALE)
    assert out.shape == inputs[0].shape and not out.any()


@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize("name", ["causal", "window", "softcap", "window and softcap"])
def test_nan_in_one_sequence_leaves_the_others_bit_by_bit(name: str, where: int) -> None:
    """In q, k, v or the gradient; for a sequence computed with others of its length and for one by
    itself; forward and backward."""
    for sequence in (3, 4):
        assert leaks(packed_attention, sequence, where, **OPTIONS[name]) == []


# The comparisons themselves.


def masked_attention(query, key, value, lengths, *, scale):
    """The right values by a mask over the packed row: 0 x NaN leaks."""
    owner = torch.repeat_interleave(
        torch.arange(len(lengths) + 1), torch.tensor([*lengths, PADDING])
    )
    seen = visible(len(query), None, query.device) & (owner[:, None] == owner)
    repeats = query.shape[1] // key.shape[1]
    q = query.transpose(0, 1)
    k, v = (x.repeat_interleave(repeats, dim=1).transpose(0, 1) for x in (key, value))
    weights = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -math.inf).softmax(dim=-1)
    return (weights @ v).transpose(0, 1) * (owner < len(lengths))[:, None, None]


def test_a_mask_over_the_packed_row_is_refused() -> None:
    """It gives the right values, and lets NaN through."""
    inputs = tensors(torch.float64)
    right = results(plain_attention, inputs)
    assert mismatches(results(masked_attention, inputs), right) == []
    assert leaks(masked_attention, 3, where=2) != []


@pytest.mark.parametrize(
    ("options", "broken"),
    [
        ({"window": 4}, {"window": 5}),
        ({"window": 4}, {"window": 3}),
        ({}, {"window": 62}),
        ({"softcap": 1.5}, {}),
        ({"softcap": 1.5}, {"softcap": 1.515}),
        ({}, {"lengths": [7, 2, 11, 7, 63, 2, 7]}),
        ({}, {"lengths": [7, 1, 12, 7, 63, 2, 8]}),
        ({}, {"lengths": [8, *LENGTHS[2:]]}),
    ],
)
def test_a_broken_twin_is_refused(options: dict, broken: dict) -> None:
    """A window off by one, a forgotten or slightly wrong soft-cap, a boundary shifted or lost."""
    inputs = tensors(torch.float32)
    right = results(plain_attention, inputs, dtype=torch.float64, **options)
    assert mismatches(results(packed_attention, inputs, **broken), right) != []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_tolerance_lies_above_the_measured_noise(dtype: torch.dtype) -> None:
    """Noise: the error of right results against float64, or against another order of sums."""
    worst = 0.0
    for seed in range(3):
        inputs = tensors(dtype, seed=seed)
        right = results(plain_attention, inputs, dtype=torch.float64)
        errors = errors_by_sequence(results(packed_attention, inputs), right)
        worst = max(worst, *(error for piece in errors for error in piece.values()))
    assert 0.05 * TOLERANCES[dtype] < worst < 0.7 * TOLERANCES[dtype]
