"""Sums over ranks in a fixed order.

A job that spans ranks has a reduction of its own: in a bucket shared with neighbours the order of
its sum would depend on them. Every rank gathers all parts and adds them up by rank, so that all of
them hold the same bits afterwards.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tlora.parallel.counting import Counts, Purpose, gather_into


def sum_in_order(
    tensors: Sequence[torch.Tensor],
    figures: Sequence[float],
    *,
    counts: Counts,
    purpose: Purpose = Purpose.GRADIENT,
) -> list[float]:
    """Make float32 tensors their sums over all ranks, in place; the sums of some numbers in double
    precision come back, by the same collective."""
    device = tensors[0].device if tensors else torch.device("cpu")
    # Numbers travel as the bits they are.
    numbers = torch.tensor(list(figures), dtype=torch.float64).view(torch.float32).to(device)
    own = torch.cat([*(tensor.reshape(-1) for tensor in tensors), numbers])
    world = dist.get_world_size()
    gathered = own.new_empty(world * len(own))
    gather_into(gathered, own)
    counts.add(purpose, gathered.numel() * gathered.element_size())
    parts = gathered.view(world, len(own)).split([len(own) - len(numbers), len(numbers)], dim=1)
    if tensors:
        total = parts[0][0].clone()
        for part in parts[0][1:]:
            total += part
        for tensor, summed in zip(
            tensors, total.split([each.numel() for each in tensors]), strict=True
        ):
            tensor.copy_(summed.view_as(tensor))
    exact = parts[1].contiguous().cpu().view(torch.float64)
    sums = [0.0] * len(figures)
    for row in exact.tolist():
        sums = [so_far + each for so_far, each in zip(sums, row, strict=True)]
    return sums
