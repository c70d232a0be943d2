"""Attention in C: right whatever the lengths and how tensors lie, bits that depend on nobody, and
what the proof refuses."""

import itertools
import math
import random

import pytest
import torch
from support.attention import (
    HEADS,
    LENGTHS,
    OPTIONS,
    PADDING,
    SCALE,
    leaks,
    mismatches,
    plain_attention,
    results,
    sequences,
    tensors,
)
from support.comparing import TOLERANCES, relative_error, same_bits
from support.native import (
    build,
    build_mutant,
    require_native_attention,
    with_fewer_instructions,
)

from tlora.kernels.attention import native, native_proof
from tlora.kernels.attention.layout import attention_layout
from tlora.kernels.attention.native import NO_WINDOW, SOURCE, Native
from tlora.kernels.attention.packed import packed_attention

pytestmark = pytest.mark.usefixtures("new_tensors_hold_nan")

SERVED = ["causal", "window", "window of one", "window above every length"]


@pytest.fixture(autouse=True)
def compiled() -> Native:
    return require_native_attention()


def starts_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def native_attention(query, key, value, lengths: list[int], **options) -> torch.Tensor:
    return native.native_attention(query, key, value, starts_of(lengths), **options)


# Right.


@pytest.mark.parametrize("key_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("name", SERVED)
def test_it_is_plain_attention_per_sequence(name: str, key_heads: int) -> None:
    inputs = tensors(torch.float32, key_heads)
    right = results(plain_attention, inputs, dtype=torch.float64, **OPTIONS[name])
    assert mismatches(results(native_attention, inputs, **OPTIONS[name]), right) == []


@pytest.mark.parametrize("seed", range(12))
def test_any_lengths_heads_and_places_of_numbers(seed: int) -> None:
    """Strips and blocks that are full, cut off, or one token long; tensors that lie token by token,
    head by head, and with gaps."""
    draw = random.Random(seed)
    key_heads, share = draw.choice([1, 2, 5]), draw.choice([1, 3])
    size, window = (
        draw.choice([1, 5, 16, 32, 40, 64, 128, 200, 256]),
        draw.choice([None, None, 1, 33, 100]),
    )
    lengths = [draw.choice([1, 2, 31, 32, 33, 63, 64, 65, 128, 200]) for _ in range(5)]
    num_rows = sum(lengths) + draw.choice([0, 7])
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int) -> torch.Tensor:
        way = draw.choice(["tokens", "heads", "gaps", "features apart"])
        shapes = {
            "tokens": (num_rows, heads, size),
            "heads": (heads, num_rows, size),
            "gaps": (num_rows, heads + 1, size + 3),
            "features apart": (num_rows, size, heads),
        }
        x = torch.randn(shapes[way], generator=generator)
        views = {
            "tokens": x,
            "heads": x.transpose(0, 1),
            "gaps": x[:, :heads, 1 : size + 1],
            "features apart": x.transpose(1, 2),
        }
        return views[way]

    qkv = [normal(heads) for heads in (share * key_heads, key_heads, key_heads)]
    dy = normal(share * key_heads)

    def run(dtype: torch.dtype, attention, where) -> list[torch.Tensor]:
        leaves = [x.to(dtype).detach().requires_grad_() for x in qkv]
        y = attention(*leaves, where, scale=0.2, window=window)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]

    found = run(torch.float32, native.native_attention, starts_of(lengths))
    layout = attention_layout(lengths, num_rows, 1)
    right = run(torch.float64, packed_attention, layout)
    sizes = [right[0], right[3], right[3], right[3]]
    for name, got, wanted, size_of in zip(
        ("y", "dq", "dk", "dv"), found, right, sizes, strict=True
    ):
        error = relative_error(got, wanted, size_of)
        assert error <= TOLERANCES[torch.float32], (name, error)


@pytest.mark.parametrize("factor", [30.0, 1e-3, 300.0])
def test_large_and_small_scores(factor: float) -> None:
    """Powers that end in 0, and weights that are all alike or but one."""
    inputs = tensors(torch.float32)
    inputs[0].mul_(factor)
    right = results(plain_attention, inputs, dtype=torch.float64)
    # Rounding of a score is rounding of its power: 3e-4 was measured where scores reach 4,000.
    limit = max(TOLERANCES[torch.float32], 2e-6 * factor)
    assert mismatches(results(native_attention, inputs), right, limit) == []


def test_sequences_without_a_token_are_none() -> None:
    """They fill the vector of starts to a size that compiled layers know."""
    inputs = tensors(torch.float32)
    clean = results(native_attention, inputs)
    filled = [LENGTHS[0], 0, 0, *LENGTHS[1:], *[0] * 50]
    assert all(map(same_bits, results(native_attention, inputs, filled), clean))
    out = native_attention(*inputs[:3], [0] * 4, scale=SCALE)
    assert out.shape == inputs[0].shape and not out.any()


def of(heads: int, size: int, num_rows: int = 40) -> torch.Tensor:
    return torch.zeros(num_rows, heads, size)


FALLING, BEHIND, LATE = ([0, 30, 20, 40], [0, 30, 41], [3, 40])
WHOLE = [0, 40]


@pytest.mark.parametrize(
    ("q", "k", "v", "starts", "window"),
    [
        (of(2, 8), of(2, 8), of(2, 8), FALLING, None),
        (of(2, 8), of(2, 8), of(2, 8), BEHIND, None),
        (of(2, 8), of(2, 8), of(2, 8), LATE, None),
        (of(2, 257), of(2, 257), of(2, 257), WHOLE, None),
        (of(6, 8), of(4, 8), of(4, 8), WHOLE, None),
        (of(2, 8), of(2, 8), of(1, 8), WHOLE, None),
        (of(2, 8), of(2, 8), of(2, 4), WHOLE, None),
        (of(2, 8), of(2, 4), of(2, 4), WHOLE, None),
        (of(2, 8), of(2, 8, 39), of(2, 8, 39), WHOLE, None),
        (of(2, 8), of(2, 8), of(2, 8), WHOLE, 0),
        (of(2, 8), of(2, 8), of(2, 8), WHOLE, -1),
        (of(2, 8), of(2, 8), of(2, 8), WHOLE, 2**31),
    ],
)
def test_what_does_not_fit_is_refused(q, k, v, starts: list[int], window: int | None) -> None:
    """Read or written to, memory of others would be in ruins."""
    where = torch.tensor(starts, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"do not fit|a window of|starts that"):
        native.native_attention(q, k, v, where, scale=SCALE, window=window)


def test_the_operators_are_what_torch_makes_of_them() -> None:
    """Shapes, and no output that is an input."""
    q, k, v, dy = tensors(torch.float32)
    where = (starts_of(LENGTHS), SCALE, NO_WINDOW)
    y, sums = torch.ops.tlora.native_attention(q, k, v, *where)
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.tlora.native_attention, (q, k, v, *where), test_utils=utilities)
    torch.library.opcheck(
        torch.ops.tlora.native_attention_backward,
        (dy, q, k, v, y, sums, *where),
        test_utils=utilities,
    )


# Bits.


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("key_heads", [2, HEADS])
def test_threads_change_no_bit(threads: int, key_heads: int) -> None:
    inputs = tensors(torch.float32, key_heads)
    alone = results(native_attention, inputs)
    torch.set_num_threads(threads)
    try:
        for _ in range(5):
            assert all(map(same_bits, results(native_attention, inputs), alone))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("name", SERVED)
def test_a_sequence_has_the_bits_that_it_has_alone(name: str) -> None:
    """Whatever is packed beside it: what `isolation: exact` stands on."""
    inputs = tensors(torch.float32)
    together = sequences(results(native_attention, inputs, **OPTIONS[name]))
    parts = zip(*(tensor.split([*LENGTHS, PADDING]) for tensor in inputs), strict=True)
    for length, found, part in zip(LENGTHS, together, parts, strict=False):
        alone = results(native_attention, part, [length], **OPTIONS[name])
        assert all(map(same_bits, found, alone))


@pytest.mark.parametrize("name", SERVED)
def test_padding_gives_zeros_and_takes_part_in_nothing(name: str) -> None:
    inputs = tensors(torch.float32)
    clean = results(native_attention, inputs, **OPTIONS[name])
    for tensor in inputs:
        tensor[-PADDING:] = math.nan
    found = results(native_attention, inputs, **OPTIONS[name])
    assert all(not value.any() for value in sequences(found)[-1])
    assert all(map(same_bits, found, clean))


@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize("name", SERVED)
def test_nan_in_one_sequence_leaves_the_others_bit_by_bit(name: str, where: int) -> None:
    for sequence in (3, 4):
        assert leaks(native_attention, sequence, where, **OPTIONS[name]) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_what_is_not_finite_shows(bad: float, where: int) -> None:
    """A job whose numbers have gone is found by its loss: no maximum or bound may swallow one."""
    inputs = tensors(torch.float32)
    last = sum(LENGTHS[:5]) - 1
    inputs[where][last] = bad
    out = native_attention(*inputs[:3], LENGTHS, scale=SCALE)
    assert not out[last].isfinite().all()


# The proof.


@with_fewer_instructions
def test_it_is_right_with_fewer_instructions(flags, tmp_path, monkeypatch) -> None:
    found = Native(build(SOURCE, tmp_path, monkeypatch, *flags))
    assert native_proof.find_fault(found) is None


MUTANTS: dict[str, tuple[str, str]] = {
    "scale forward": (
        "queries, (float)t->scale, scores",
        "queries, 1.01f * (float)t->scale, scores",
    ),
    "scale of scores backward": (
        "queries, (float)t->scale, powers",
        "queries, 1.01f * (float)t->scale, powers",
    ),
    "scale of dK": ("dk + to, to_row, (float)t->scale", "dk + to, to_row, 1"),
    "scale of dQ": (
        "to_row, (float)t->scale,\n                first > begin",
        "to_row, 1,\n                first > begin",
    ),
    "a query sees the next key": ("queries >= (int32_t)key", "queries >= (int32_t)key - 1"),
    "a query does not see itself": ("queries >= (int32_t)key", "queries > (int32_t)key"),
    "all see the next key": ("return key <= own->first &&", "return key <= own->first + 1 &&"),
    "all see a key out of the window": (
        "own->first + own->count - 1);\n}",
        "own->first + own->count - 2);\n}",
    ),
    "a window of one more": ("< (int32_t)t->window", "<= (int32_t)t->window"),
    "a window of one less": ("< (int32_t)t->window", "< (int32_t)t->window - 1"),
    "the first key of a window": ("query - t->window + 1;", "query - t->window + 2;"),
    "head of the keys": ("head * t->kv_heads / t->heads", "head % t->kv_heads"),
    "sums are not shrunk": ("sum[n] *= shrunk;", ""),
    "outputs are not shrunk": ("*= factor[m];", "*= 1;"),
    "outputs are not divided": ("y[m * y_row + f] *= part;", "y[m * y_row + f] *= 1;"),
    "the first block alone": ("y, y_row, 1, first > begin);", "y, y_row, 1, 0);"),
    "logarithm of the sum": (" + logf(whole);", ";"),
    "dY Y": ("(*value - of_y[n])", "(*value)"),
    "dY Y of another head": ("= inner[place];", "= inner[place / t->heads * t->heads];"),
    "dY Y of another query": (
        "of_y[m / LANES][m % LANES] = inner",
        "of_y[m / LANES][m % LANES ^ 1] = inner",
    ),
    "dK is written over": (
        "dk + to, to_row, (float)t->scale, 1",
        "dk + to, to_row, (float)t->scale, 0",
    ),
    "the last head's share is lost": ("m < shared;", "m < shared - (shared > 5);"),
    "keys of another sequence": (
        "strip own = {start, first, least",
        "strip own = {t->starts[sequence & ~1], first, least",
    ),
    "power": ("1.6666665459e-1f", "1.67e-1f"),
    "powers of what is lost": (
        "x < -87.0f, (vec){0} - 87.0f, x)",
        "x > -87.0f, x, (vec){0} - 87.0f)",
    ),
    "the largest of all keys": ("                larger &= seeing(t, own, n, first + j);", ""),
    "turned by half": ("first < columns; first += LANES", "first < columns; first += 2 * LANES"),
    "the rest of the columns": (
        "n < columns ? from[k * stride + n]",
        "n < columns ? from[k * stride]",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_proof_refuses_what_is_slightly_wrong(name: str, tmp_path, monkeypatch) -> None:
    broken = Native(build_mutant(SOURCE, *MUTANTS[name], tmp_path, monkeypatch))
    assert native_proof.find_fault(broken) is not None


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_proof_is_the_same_whatever_torch_makes_by_default(default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with torch.inference_mode():
            assert native_proof.find_fault(require_native_attention()) is None
    finally:
        torch.set_default_dtype(before)


# Where it serves.


def test_it_serves_float32_without_soft_caps_and_sinks() -> None:
    q, k, v, _ = tensors(torch.float32)
    assert native.serves(q, k, v, None, None)
    assert not native.serves(q, k, v, 30.0, None)
    assert not native.serves(q, k, v, None, torch.zeros(HEADS))
    assert not native.serves(q, k, v[..., :4], None, None)
    assert not native.serves(q.double(), k.double(), v.double(), None, None)
    assert not native.serves(q.bfloat16(), k, v, None, None)
    wide = q.new_zeros(1, 1, 257)
    assert not native.serves(wide, wide, wide, None, None)
    assert not native.serves(q.to("meta"), k.to("meta"), v.to("meta"), None, None)
    assert not native.serves(q, k[:, :1].expand(-1, 4, -1), v[:, :1].expand(-1, 4, -1), None, None)
