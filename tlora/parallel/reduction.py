"""Sums over ranks in a fixed order.

A job that spans ranks has a reduction of its own: in a bucket shared with neighbours the order of
its sum would depend on them. Every rank adds up one part of the gradient, by rank, and all gather
the sums, so that all hold the same bits afterwards: those of adding everything up everywhere, for
twice the gradient's bytes on each rank, whatever their number.
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
    precision come back, by the collective that gathers the sums."""
    device = tensors[0].device if tensors else torch.device("cpu")
    world = dist.get_world_size()
    own = _sum_of_part(tensors, world, counts, purpose) if tensors else torch.empty(0)
    # Numbers travel as the bits they are.
    numbers = torch.tensor(list(figures), dtype=torch.float64).view(torch.float32).to(device)
    own = torch.cat([own, numbers])
    gathered = own.new_empty(world * len(own))
    gather_into(gathered, own)
    counts.add(purpose, gathered.numel() * gathered.element_size())
    parts, exact = gathered.view(world, -1).split([len(own) - len(numbers), len(numbers)], dim=1)
    _fill(tensors, parts.reshape(-1))
    sums = [0.0] * len(figures)
    for row in exact.contiguous().cpu().view(torch.float64).tolist():
        sums = [so_far + each for so_far, each in zip(sums, row, strict=True)]
    return sums


def _sum_of_part(
    tensors: Sequence[torch.Tensor], world: int, counts: Counts, purpose: Purpose
) -> torch.Tensor:
    """All ranks send each its part; what arrives is added up in their order."""
    missing = -sum(tensor.numel() for tensor in tensors) % world
    padding = tensors[0].new_zeros(missing)
    own = torch.cat([*(tensor.reshape(-1) for tensor in tensors), padding])
    arrived = torch.empty_like(own)
    dist.all_to_all_single(arrived, own)
    counts.add(purpose, arrived.numel() * arrived.element_size())
    first, *others = arrived.view(world, -1)
    total = first.clone()
    for part in others:
        total += part
    return total


def _fill(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """What is left of `flat` is padding."""
    place = 0
    for tensor in tensors:
        tensor.copy_(flat[place : place + tensor.numel()].view_as(tensor))
        place += tensor.numel()
