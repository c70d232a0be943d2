"""The dropout hash once more, in plain Python integers: slow, and with nothing of ours in it."""

import torch

MASK32 = 2**32 - 1


def mix(value: int) -> int:
    value ^= value >> 16
    value = (value * 2146121005) % 2**32
    value ^= value >> 15
    value = (value * 2221713035) % 2**32
    return value ^ (value >> 16)


def step_key(seed: int, step: int) -> int:
    low, high = seed & MASK32, (seed >> 32) & MASK32
    return mix(mix(mix(low) ^ mix(high ^ 0x243F6A88)) ^ mix(step ^ 0x85A308D3))


def linear_key(key: int, linear: int) -> int:
    return mix(key ^ mix(linear ^ 0x13198A2E))


def bits(key: int, row: int, feature: int) -> int:
    """The 32 bits of one value; `key` is a linear's."""
    h_row, h_feature = mix(mix(row) ^ key), mix(feature ^ 0x03707344)
    rotated = (h_feature >> 16) + (h_feature << 16) % 2**32
    return (h_row * (h_feature | 1) + rotated) % 2**32


def keep_mask(key: int, rows: list[int], num_features: int, threshold: int) -> torch.Tensor:
    """bool [rows, features]."""
    return torch.tensor(
        [[bits(key, row, feature) >= threshold for feature in range(num_features)] for row in rows]
    ).view(len(rows), num_features)
