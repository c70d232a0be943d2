"""The output head and the cross-entropy in one, without ever holding all logits."""

from tlora.kernels.linear_cross_entropy.function import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
