"""Each token's loss goes back with its own job's scale, and is counted for its own job."""

import torch

from tlora.model.packing import PackedBatch


def backward(losses: torch.Tensor, batch: PackedBatch) -> None:
    """Send every token back with the scale of its own job's batch: a cotangent per token, so that
    no job's loss is ever added to another's."""
    torch.autograd.backward(losses, batch.loss_scales)


def sequence_sums(losses: torch.Tensor, batch: PackedBatch) -> dict[str, list[float]]:
    """Per job, the summed loss of each of its sequences, in double precision: figures that do not
    depend on how a batch was cut."""
    host = losses.detach().double().cpu()
    return {
        segment.job: [
            float(part.sum()) for part in host[segment.targets].split(segment.sequence_targets)
        ]
        for segment in batch.segments
    }
