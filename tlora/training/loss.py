"""Each token's loss goes back with its own job's scale; of a preference pair, with its side's."""

import torch


def backward(losses: torch.Tensor, scales: torch.Tensor) -> None:
    """Send every token back with its scale: a cotangent per token, so that no job's loss is ever
    added to another's."""
    torch.autograd.backward(losses, scales)
