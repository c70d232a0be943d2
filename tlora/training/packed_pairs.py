"""The preference pairs of a nano-batch, and what their tokens are sent back with.

The derivative of a pair's loss (preference.py) by the loss of any token of one side is the same
number. So in backward a pair is nothing but tokens with a scale of their own, made here from the
losses that forward gave: the loss per token, and all supervised jobs in the nano-batch, stay as
they are, and the host waits for nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tlora.model.packing import PackedBatch, on_device
from tlora.training.batch import FedUnit, Passage


@dataclass(frozen=True, slots=True, eq=False)
class PackedPairs:
    """The P pairs of a nano-batch, of all preference jobs in it."""

    starts: torch.Tensor
    """int64 [2P]: where each side's losses begin among the nano-batch's, chosen and rejected in
    turn."""

    counts: torch.Tensor
    """int64 [2P]: how many they are."""

    longest: int
    """Of them."""

    places: list[int]
    """Of each pair among the references."""

    reference: torch.Tensor
    """int64 [P]: the same on the device."""

    sides: torch.Tensor
    """int64 [N]: the side that each loss belongs to, -1 where it is of a supervised job."""

    beta: torch.Tensor
    """float64 [P], as the two below."""

    label_smoothing: torch.Tensor
    loss_scales: torch.Tensor
    """What each pair's loss counts in its job's loss."""

    def sums(self, losses: torch.Tensor) -> torch.Tensor:
        """float64 [P, 2]: the summed loss of each side."""
        return sequence_sums(losses.detach(), self.starts, self.counts, self.longest).view(-1, 2)

    def scales(
        self, losses: torch.Tensor, reference: torch.Tensor, loss_scales: torch.Tensor
    ) -> torch.Tensor:
        """float32 [N]: what each token is sent back with. `reference` is [P, 2]; `loss_scales` [N]
        stay as they are for the tokens of supervised jobs."""
        rewards = self.beta[:, None] * (reference - self.sums(losses))
        margin = rewards[:, 0] - rewards[:, 1]
        smoothing = self.label_smoothing
        pull = (1.0 - smoothing) * torch.sigmoid(-margin) - smoothing * torch.sigmoid(margin)
        slope = self.loss_scales * self.beta * pull
        sides = torch.stack((slope, -slope), dim=1).flatten().float()
        # By selection: a job whose loss is no number must not reach its neighbours.
        return torch.where(self.sides < 0, loss_scales, sides[self.sides.clamp(min=0)])


def sequence_sums(
    losses: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor, longest: int
) -> torch.Tensor:
    """float64 [S]: sums over runs of losses, whose bits depend on the run alone: it is folded in
    halves of a power of two, and a larger power only adds zeros."""
    width = 1 << max(0, longest - 1).bit_length()
    places = torch.arange(width, device=losses.device)
    inside = places < counts[:, None]
    index = (starts[:, None] + places).clamp(max=len(losses) - 1)
    values = torch.where(inside, losses[index].double(), 0.0)
    while width > 1:
        width //= 2
        values = values[:, :width] + values[:, width:]
    return values[:, 0]


def pack_pairs(
    batch: PackedBatch, passages: Sequence[Passage], device: torch.device
) -> PackedPairs | None:
    """Of the nano-batch that these are in, in order; None if there are no pairs."""
    starts: list[int] = []
    counts: list[int] = []
    fed: list[FedUnit] = []
    settings: list[tuple[float, float, float]] = []
    sides = np.full(len(batch.targets), -1, dtype=np.int64)
    for segment, passage in zip(batch.segments, passages, strict=True):
        if passage.batch.preference is None:
            continue
        dpo = passage.batch.preference.dpo
        start = segment.targets.start
        for count in segment.sequence_targets:
            sides[start : start + count] = len(starts)
            starts.append(start)
            counts.append(count)
            start += count
        fed += passage.fed
        settings += [(dpo.beta, dpo.label_smoothing, each.loss_scale) for each in passage.fed]
    if not fed:
        return None
    places = [each.reference for each in fed]
    beta, label_smoothing, loss_scales = np.array(settings, dtype=np.float64).T.copy()
    return PackedPairs(
        starts=on_device(device, np.array(starts, dtype=np.int64)),
        counts=on_device(device, np.array(counts, dtype=np.int64)),
        longest=max(counts),
        places=places,
        reference=on_device(device, np.array(places, dtype=np.int64)),
        sides=on_device(device, sides),
        beta=on_device(device, beta),
        label_smoothing=on_device(device, label_smoothing),
        loss_scales=on_device(device, loss_scales),
    )
