"""The dropout streams of `kernels/streams.py` inside Triton kernels, bit for bit."""

import triton
import triton.language as tl

from tlora.kernels import streams

LINEAR_SALT = tl.constexpr(streams.LINEAR_SALT)
FEATURE_SALT = tl.constexpr(streams.FEATURE_SALT)


@triton.jit
def mix(value):
    """`streams.mix` on uint32, which wraps."""
    value ^= value >> 16
    value *= 0x7FEB352D
    value ^= value >> 15
    value *= 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def linear_key(key, linear):
    return mix(key ^ mix(linear.to(tl.uint32) ^ LINEAR_SALT))


@triton.jit
def row_hash(rows, key):
    """The part of the hash that a token decides; `key` is a linear's key."""
    return mix(mix(rows.to(tl.uint32, bitcast=True)) ^ key)


@triton.jit
def feature_hash(features):
    return mix(features.to(tl.uint32) ^ FEATURE_SALT)


@triton.jit
def kept(b_rows, b_features, threshold):
    """Where a value is kept: [rows, features] of bool, from the two parts of its hash."""
    b_terms = (b_features >> 16) | (b_features << 16)
    return b_rows[:, None] * (b_features | 1)[None, :] + b_terms[None, :] >= threshold
