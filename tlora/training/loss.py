"""Each token's loss goes back with its own job's scale."""

import torch

from tlora.model.packing import PackedBatch


def backward(losses: torch.Tensor, batch: PackedBatch) -> None:
    """Send every token back with the scale of its own job's batch: a cotangent per token, so that
    no job's loss is ever added to another's."""
    torch.autograd.backward(losses, batch.loss_scales)
