"""Dropout without a random state: a mask is a function of who, when and where.

A bit of the mask depends on the job's seed, its step, the linear, the token's place in the job's
own batch and the feature, and on nothing else, so it is the same alone, in any company, after a
restart and on any device. The hash is 32-bit integer arithmetic that wraps, the same in Python,
torch and Triton: a token (with its linear's key) and a feature are mixed well once each, and meet
in one multiplication and one addition,

    bits = h_row * (h_feature | 1) + rotate16(h_feature),

because there are as many meetings as values in the activations. The comparison with the threshold
reads the high bits, which are the good ones of a product. `tests/kernels/test_streams.py` holds the
statistics of the masks.
"""

import functools

import numpy as np
import torch

MASK32 = 0xFFFFFFFF
SEED_SALT = 0x243F6A88
STEP_SALT = 0x85A308D3
LINEAR_SALT = 0x13198A2E
FEATURE_SALT = 0x03707344


def mix(value: int) -> int:
    """A 32-bit bijection in which every input bit moves every output bit about half of the time."""
    value &= MASK32
    value ^= value >> 16
    value = value * 0x7FEB352D & MASK32
    value ^= value >> 15
    value = value * 0x846CA68B & MASK32
    return value ^ value >> 16


def step_key(seed: int, step: int) -> int:
    """The key of one job's step: 32 bits from a seed of up to 64 bits and the step's number."""
    seed_key = mix(mix(seed & MASK32) ^ mix((seed >> 32 & MASK32) ^ SEED_SALT))
    return mix(seed_key ^ mix(step ^ STEP_SALT))


def linear_key(key: int, linear: int) -> int:
    """The key of one linear inside a step."""
    return mix(key ^ mix(linear ^ LINEAR_SALT))


def threshold(dropout: float) -> int:
    """A value is kept if its 32 hash bits, read as unsigned, are at least this."""
    return int(dropout * 2**32)


def keep_mask(rows: torch.Tensor, num_features: int, *, key: int, threshold: int) -> torch.Tensor:
    """bool [rows, features]: True where the value is kept. `key` is a linear's key."""
    if rows.device.type == "cpu":
        bits = _host_bits(rows.numpy(), num_features, key)
        return torch.from_numpy(bits >= np.uint32(threshold))
    # Unsigned comparison: flip the sign bit of both sides.
    return (_device_bits(rows, num_features, key) ^ -(2**31)) >= threshold - 2**31


def apply_mask(x: torch.Tensor, kept: torch.Tensor, threshold: int) -> torch.Tensor:
    """Values that are not kept become zero, by selection; the others are scaled by 1 / (1 - p). Its
    own adjoint."""
    return torch.where(kept, x * (1.0 / (1.0 - threshold / 2**32)), 0.0)


def dropped(x: torch.Tensor, rows: torch.Tensor, *, key: int, threshold: int) -> torch.Tensor:
    """x after dropout."""
    if threshold == 0:
        return x
    kept = keep_mask(rows, x.shape[-1], key=key, threshold=threshold)
    return apply_mask(x, kept, threshold)


def _host_bits(rows: np.ndarray, num_features: int, key: int) -> np.ndarray:
    """uint32 [rows, features]. numpy, because its unsigned arithmetic is defined to wrap and took a
    quarter of the time of torch's int32 on two cores."""
    h_rows = _mix_array(_mix_array(rows.astype(np.uint32)) ^ np.uint32(key))
    factors, terms = _host_features(num_features)
    bits = h_rows[:, None] * factors[None, :]
    bits += terms
    return bits


@functools.lru_cache(maxsize=64)
def _host_features(num_features: int) -> tuple[np.ndarray, np.ndarray]:
    """A feature's odd factor, and its term."""
    hashes = _mix_array(np.arange(num_features, dtype=np.uint32) ^ np.uint32(FEATURE_SALT))
    return hashes | np.uint32(1), hashes >> np.uint32(16) | hashes << np.uint32(16)


def _mix_array(values: np.ndarray) -> np.ndarray:
    """`mix`, in place."""
    values ^= values >> np.uint32(16)
    values *= np.uint32(0x7FEB352D)
    values ^= values >> np.uint32(15)
    values *= np.uint32(0x846CA68B)
    values ^= values >> np.uint32(16)
    return values


def _device_bits(rows: torch.Tensor, num_features: int, key: int) -> torch.Tensor:
    """The same bits as int32, on any device."""
    h_rows = _mix_tensor(_mix_tensor(rows.to(torch.int32, copy=True)) ^ _signed(key))
    features = torch.arange(num_features, dtype=torch.int32, device=rows.device)
    h_features = _mix_tensor(features ^ _signed(FEATURE_SALT))
    terms = (h_features >> 16) & 0xFFFF | h_features << 16
    return h_rows[:, None] * (h_features | 1) + terms


def _mix_tensor(values: torch.Tensor) -> torch.Tensor:
    """`mix` on int32, in place: multiplication wraps; the arithmetic shift is masked to a logical
    one."""
    values ^= (values >> 16) & 0xFFFF
    values *= _signed(0x7FEB352D)
    values ^= (values >> 15) & 0x1FFFF
    values *= _signed(0x846CA68B)
    values ^= (values >> 16) & 0xFFFF
    return values


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value
