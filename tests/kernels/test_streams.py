"""Dropout streams: the hash is the documented one, its masks look like independent coin tosses."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support import plain_hash
from support.comparing import same_bits

from tlora.kernels import streams

SEEDS = [0, 1, 42, 2**31, 2**32 - 1, 2**32, 7 * 2**40 + 3, 2**64 - 1]

Stream = Callable[[int, int, int, np.ndarray, int], np.ndarray]
"""(seed, step, linear, rows, features) to uint32 [rows, features]."""


def real(seed: int, step: int, linear: int, rows: np.ndarray, num_features: int) -> np.ndarray:
    key = streams.linear_key(streams.step_key(seed, step), linear)
    return streams._host_bits(rows, num_features, key)


# The hash.


@pytest.mark.parametrize("seed", SEEDS)
def test_the_hash_is_the_plain_one_on_host_and_device(seed: int) -> None:
    """numpy's uint32, torch's int32 and plain Python integers give the same 32 bits."""
    rows = [0, 1, 2, 63, 4095, 2**16, 2**31 - 1]
    for step, linear in [(0, 0), (1, 0), (0, 1), (99_999, 223)]:
        key = streams.linear_key(streams.step_key(seed, step), linear)
        assert key == plain_hash.linear_key(plain_hash.step_key(seed, step), linear)
        plain = [[plain_hash.bits(key, row, feature) for feature in range(33)] for row in rows]
        host = streams._host_bits(np.array(rows, dtype=np.int32), 33, key)
        device = streams._device_bits(torch.tensor(rows, dtype=torch.int32), 33, key)
        assert host.tolist() == plain
        assert [[value % 2**32 for value in row] for row in device.tolist()] == plain


def test_a_value_is_kept_if_its_bits_reach_the_threshold() -> None:
    """u32 >= threshold, unsigned, at the very edge and at both ends, on host and device."""
    key = streams.linear_key(streams.step_key(5, 6), 7)
    rows = torch.arange(16, dtype=torch.int32)
    bits = streams._host_bits(rows.numpy(), 8, key)
    edges = [int(value) for value in bits.flatten()[:40]]
    for threshold in [*edges, *(edge + 1 for edge in edges), 0, 1, 2**31, 2**32 - 1]:
        wanted = torch.from_numpy(bits.astype(np.int64) >= threshold)
        device = (streams._device_bits(rows, 8, key) ^ -(2**31)) >= threshold - 2**31
        assert torch.equal(streams.keep_mask(rows, 8, key=key, threshold=threshold), wanted)
        assert torch.equal(device, wanted)
    assert len({edge >= 2**31 for edge in edges}) == 2, "values on both sides of the sign bit"


@pytest.mark.parametrize("dropout", [0.0, 1e-9, 0.05, 0.1, 0.3, 1 / 3, 0.5, 0.9, 1 - 1e-9])
def test_the_threshold_is_the_floor_of_p_times_two_to_the_32(dropout: float) -> None:
    """In exact arithmetic on the double that p is."""
    numerator, denominator = dropout.as_integer_ratio()
    assert streams.threshold(dropout) == numerator * 2**32 // denominator


# What it does to values.


def test_kept_values_are_scaled_by_one_over_keep_and_others_are_zero() -> None:
    """Where the mask is False even a NaN becomes zero: by selection, not by a product."""
    x = torch.randn(50, 40, dtype=torch.float64)
    rows = torch.arange(50, dtype=torch.int32)
    for dropout in (0.05, 0.3, 0.75):
        stream = {"key": 12345, "threshold": streams.threshold(dropout)}
        kept = streams.keep_mask(rows, 40, **stream)
        poisoned = torch.where(kept, x, torch.nan)
        out = streams.dropped(poisoned, rows, **stream)
        assert torch.equal(out[~kept], torch.zeros_like(out[~kept]))
        # The threshold is p to 32 bits, so the factor is right to about as many.
        torch.testing.assert_close(out[kept], x[kept] / (1 - dropout), rtol=2**-30, atol=0)


def test_no_dropout_is_the_identity() -> None:
    """p = 0 hands back the very tensor, and its mask would keep everything."""
    x, rows = torch.randn(9, 5), torch.arange(9, dtype=torch.int32)
    assert streams.dropped(x, rows, key=3, threshold=streams.threshold(0.0)) is x
    assert streams.keep_mask(rows, 5, key=3, threshold=0).all()


def test_the_mask_is_its_own_adjoint() -> None:
    """<drop(x), y> = <x, drop(y)>: what backward relies on."""
    rows = torch.arange(30, dtype=torch.int32)
    stream = {"key": 99, "threshold": streams.threshold(0.4)}
    x, y = torch.randn(2, 30, 20, dtype=torch.float64)
    left = (streams.dropped(x, rows, **stream) * y).sum()
    right = (x * streams.dropped(y, rows, **stream)).sum()
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_a_mask_depends_on_nothing_but_its_key_row_and_feature() -> None:
    """Not on the order, number or type of the rows, the width or the random state."""
    rows = torch.randperm(500).int()
    stream = {"key": 0xDEADBEEF, "threshold": streams.threshold(0.5)}
    mask = streams.keep_mask(rows, 64, **stream)
    torch.manual_seed(1)
    order = torch.randperm(500)
    assert torch.equal(streams.keep_mask(rows[order], 64, **stream), mask[order])
    assert torch.equal(streams.keep_mask(rows[100:103], 64, **stream), mask[100:103])
    assert torch.equal(streams.keep_mask(rows.long(), 64, **stream), mask)
    assert torch.equal(streams.keep_mask(rows, 17, **stream), mask[:, :17])
    assert torch.equal(streams.keep_mask(rows, 200, **stream)[:, :64], mask)
    assert torch.equal(streams.keep_mask(rows[::3], 64, **stream), mask[::3])


def test_making_a_mask_leaves_its_rows_and_the_random_state_alone() -> None:
    """The hash works in place, on copies."""
    rows = torch.arange(20, dtype=torch.int32)
    before, state = rows.clone(), torch.get_rng_state()
    streams.keep_mask(rows, 8, key=1, threshold=2**31)
    streams._device_bits(rows, 8, 1)
    assert same_bits(rows, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_that_differ_above_32_bits_have_different_keys() -> None:
    """All 64 bits of a seed count, and the two halves are not interchangeable."""
    seeds = [*SEEDS, 1 << 33, (1 << 32) + 1, 3 << 32, 3]
    keys = {streams.step_key(seed, step) for seed in seeds for step in range(100)}
    assert len(keys) == len(set(seeds)) * 100


# Its statistics. Every check is a number of standard deviations from what independent tosses give.
# The hash stays below 3.9 in all of them; twins with one part missing leave the limit far behind.

LIMIT = 6.0
DROPOUTS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.9)
ROWS, FEATURES = np.arange(256, dtype=np.int32), 256


def correlation_sigmas(left: np.ndarray, right: np.ndarray, p: float) -> float:
    """How far two masks, kept with probability 1 - p, are from uncorrelated."""
    centred = (left - (1 - p)) * (right - (1 - p)) / (p * (1 - p))
    return abs(float(centred.sum())) / np.sqrt(centred.size)


def chi_square_sigmas(counts: np.ndarray, wanted: np.ndarray | float) -> float:
    """How far Pearson's statistic is from its mean, in its standard deviations."""
    freedom = counts.size - 1
    statistic = float(((counts - wanted) ** 2 / wanted).sum())
    return (statistic - freedom) / np.sqrt(2 * freedom)


def marginal_checks(stream: Stream) -> dict[str, float]:
    """Means, every output bit, and the spread of the counts per row and per feature."""
    bits = stream(3, 4, 5, ROWS, FEATURES)
    n, checks = bits.size, {}
    for p in DROPOUTS:
        kept = bits >= streams.threshold(p)
        checks[f"mean at {p}"] = abs(kept.mean() - (1 - p)) / np.sqrt(p * (1 - p) / n)
        for name, axis in (("rows", 1), ("features", 0)):
            counts = kept.sum(axis=axis)
            spread = ((counts - 256 * (1 - p)) ** 2 / (256 * p * (1 - p))).sum()
            checks[f"spread over {name} at {p}"] = abs(spread - 256) / np.sqrt(2 * 256)
    for bit in range(32):
        ones = int((bits >> np.uint32(bit) & np.uint32(1)).sum())
        checks[f"balance of bit {bit}"] = abs(ones - n / 2) / np.sqrt(n / 4)
    top_bytes = np.bincount((bits >> np.uint32(24)).ravel(), minlength=256)
    checks["values of the top byte"] = chi_square_sigmas(top_bytes, n / 256)
    return checks


def neighbour_checks(stream: Stream) -> dict[str, float]:
    """Rows against rows, features against features, and the four corners of rectangles."""
    checks = {}
    for p in (0.1, 0.5):
        kept = (stream(3, 4, 5, ROWS, FEATURES) >= streams.threshold(p)).astype(np.float64)
        for lag in (1, 2, 3, 4, 8, 16, 64, 128):
            checks[f"rows {lag} apart at {p}"] = correlation_sigmas(kept[lag:], kept[:-lag], p)
            checks[f"features {lag} apart at {p}"] = correlation_sigmas(
                kept[:, lag:], kept[:, :-lag], p
            )
            centred = (kept - (1 - p)) / np.sqrt(p * (1 - p))
            corners = centred[lag:, lag:] * centred[:-lag, :-lag]
            corners = corners * centred[lag:, :-lag] * centred[:-lag, lag:]
            checks[f"rectangles {lag} wide at {p}"] = abs(corners.sum()) / np.sqrt(corners.size)
        # A random matrix of unit variance has its largest singular value at sqrt(m) + sqrt(n), give
        # or take m^(-1/6) / 2; any structure shared by rows or by features adds to it.
        largest = np.linalg.norm((kept - (1 - p)) / np.sqrt(p * (1 - p)), 2)
        edge, spread = 2 * np.sqrt(256), 256 ** (-1 / 6) * 2 ** (4 / 3) / 2
        checks[f"largest singular value at {p}"] = (largest - edge) / spread
    return checks


def stream_checks(stream: Stream) -> dict[str, float]:
    """Masks of other steps, linears and seeds: pairs of values jointly, and no row twice."""
    seen, checks = {}, {}
    origin = (3, 4, 5)
    others = [(3, 5, 5), (3, 4, 6), (4, 4, 5), (3, 6, 5), (3, 4, 7), (3, 5, 4), (4, 3, 5)]
    others += [(3, 4, 5 + 2**k) for k in range(2, 8)] + [(3, 4 + 2**k, 5) for k in range(3, 16, 4)]
    others += [(3 + 2**k, 4, 5) for k in (8, 16, 31, 32, 48, 63)]
    first = stream(*origin, ROWS, FEATURES)
    for name in [origin, *others]:
        bits = stream(*name, ROWS, FEATURES)
        for values in bits:
            seen[values.tobytes()] = seen.get(values.tobytes(), 0) + 1
        if name != origin:
            # Three bits of each, jointly: 64 cells.
            cells = (first >> np.uint32(29)) * 8 + (bits >> np.uint32(29))
            counts = np.bincount(cells.ravel(), minlength=64)
            checks[f"jointly with {name}"] = chi_square_sigmas(counts, bits.size / 64)
            for p in (0.1, 0.5):
                both = [(b >= streams.threshold(p)).astype(np.float64) for b in (first, bits)]
                checks[f"correlation with {name} at {p}"] = correlation_sigmas(*both, p)
    repeated = sum(times > 1 for times in seen.values())
    checks["rows that come twice"] = float("inf") if repeated else 0.0
    return checks


def avalanche_checks(stream: Stream) -> dict[str, float]:
    """One bit of the row, feature, linear, step or seed flips every output bit half the time, but
    for the lowest eight: they are the weak ones of a product, and one mask bit in 2^24 depends on
    them."""
    rows = np.random.default_rng(0).integers(0, 2**24, 256, dtype=np.int32)
    base = stream(3, 4, 5, rows, 128)
    changed = {
        **{f"row bit {k}": stream(3, 4, 5, rows ^ np.int32(1 << k), 128) for k in range(0, 24, 2)},
        **{f"linear bit {k}": stream(3, 4, 5 ^ 1 << k, rows, 128) for k in range(8)},
        **{f"step bit {k}": stream(3, 4 ^ 1 << k, 5, rows, 128) for k in range(0, 20, 2)},
        **{f"seed bit {k}": stream(3 ^ 1 << k, 4, 5, rows, 128) for k in range(0, 64, 7)},
    }
    features = np.arange(128)
    pairs = {name: (base, other) for name, other in changed.items()}
    for k in range(7):
        pairs[f"feature bit {k}"] = (base, base[:, features ^ 1 << k])
    checks = {}
    for name, (left, right) in pairs.items():
        flipped = left ^ right
        # With features paired both ways every flip is counted twice.
        n = flipped.size / 2 if name.startswith("feature") else flipped.size
        rates = [(flipped >> np.uint32(bit) & np.uint32(1)).mean() for bit in range(8, 32)]
        checks[name] = max(abs(rate - 0.5) for rate in rates) * 2 * np.sqrt(n)
    return checks


CHECKS = [marginal_checks, neighbour_checks, stream_checks, avalanche_checks]


def complaints(checks: dict[str, float]) -> dict[str, float]:
    return {name: sigmas for name, sigmas in checks.items() if not sigmas < LIMIT}


@pytest.mark.parametrize("check", CHECKS)
def test_masks_look_like_independent_tosses(check: Callable[[Stream], dict[str, float]]) -> None:
    """Means, bits, neighbours in both directions, other streams, avalanche."""
    assert complaints(check(real)) == {}


def without_the_product(seed, step, linear, rows, num_features):
    key = streams.linear_key(streams.step_key(seed, step), linear)
    h_rows = streams._mix_array(streams._mix_array(rows.astype(np.uint32)) ^ np.uint32(key))
    factors, _ = streams._host_features(num_features)
    return h_rows[:, None] ^ factors[None, :]


def ignoring_the_linear(seed, step, linear, rows, num_features):
    return real(seed, step, 0, rows, num_features)


def ignoring_the_step(seed, step, linear, rows, num_features):
    return real(seed, 0, linear, rows, num_features)


def with_seed_and_step_added(seed, step, linear, rows, num_features):
    return real(seed + step, 0, linear, rows, num_features)


def ignoring_the_high_seed(seed, step, linear, rows, num_features):
    return real(seed % 2**32, step, linear, rows, num_features)


def with_rows_and_linears_added(seed, step, linear, rows, num_features):
    return real(seed, step, 0, rows + linear, num_features)


def a_linear_congruence(seed, step, linear, rows, num_features):
    key = streams.linear_key(streams.step_key(seed, step), linear)
    places = rows.astype(np.uint32)[:, None] * np.uint32(num_features)
    places = places + np.arange(num_features, dtype=np.uint32)
    return (places ^ np.uint32(key)) * np.uint32(1664525) + np.uint32(1013904223)


def one_per_cent_too_often(seed, step, linear, rows, num_features):
    bits = real(seed, step, linear, rows, num_features)
    return np.where(bits < 2**32 // 100, np.uint32(2**32 - 1), bits).astype(np.uint32)


@pytest.mark.parametrize(
    ("twin", "check"),
    [
        (without_the_product, neighbour_checks),
        (without_the_product, stream_checks),
        (ignoring_the_linear, stream_checks),
        (ignoring_the_linear, avalanche_checks),
        (ignoring_the_step, stream_checks),
        (with_seed_and_step_added, stream_checks),
        (ignoring_the_high_seed, stream_checks),
        (with_rows_and_linears_added, stream_checks),
        (a_linear_congruence, neighbour_checks),
        (a_linear_congruence, avalanche_checks),
        (one_per_cent_too_often, marginal_checks),
    ],
)
def test_a_broken_hash_is_refused(
    twin: Stream, check: Callable[[Stream], dict[str, float]]
) -> None:
    """The same checks see each missing part."""
    assert complaints(check(twin)) != {}
