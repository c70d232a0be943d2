"""Causal attention over packed rows in which no sequence sees another."""

from tlora.kernels.attention.packed import packed_attention

__all__ = ["packed_attention"]
