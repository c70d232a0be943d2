"""A nano-batch through the model: forward, and backward where it is trained on.

On a GPU this only launches; whoever reads what comes back waits (in_flight.py).
"""

from collections.abc import Callable, Mapping

import torch

from tlora.model.packing import PackedBatch, pack
from tlora.model.super_model import SuperModel
from tlora.training import loss
from tlora.training.compose import Composition, Kind
from tlora.training.engine_job import EngineJob
from tlora.training.in_flight import InFlight
from tlora.training.packed_pairs import pack_pairs
from tlora.training.references import References


def launch(
    launched: InFlight,
    composition: Composition,
    jobs: Mapping[str, EngineJob],
    super_model: SuperModel,
    references: References,
) -> None:
    """The passages of the nano-batch, and what will be known of their losses, go to `launched`."""
    kind, device = composition.kind, super_model.device
    adapted = kind is not Kind.REFERENCE
    for pick in composition.picks:
        launched.passages.append(jobs[pick.job].passage(pick.indices))
    shares = [
        jobs[passage.batch.job].share(passage, adapted=adapted) for passage in launched.passages
    ]
    batch = pack(shares, composition.rows, device)
    pairs = None if kind is Kind.EVALUATE else pack_pairs(batch, launched.passages, device)

    def scales(losses: torch.Tensor) -> torch.Tensor:
        if pairs is None:
            return batch.loss_scales
        return pairs.scales(losses, references.read(pairs.reference), batch.loss_scales)

    losses = run_through(super_model, batch, train=kind is Kind.TRAIN, scales=scales)
    launched.keep_losses(losses, batch)
    launched.settled = super_model.settled
    if pairs is not None and not adapted:
        references.write(pairs.places, pairs.reference, pairs.sums(losses))


def run_through(
    super_model: SuperModel,
    batch: PackedBatch,
    *,
    train: bool,
    scales: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """float32 [N]: the loss of every trained token. In training each goes back with its scale, what
    it counts in its job's loss."""
    with torch.set_grad_enabled(train), super_model.routed(batch, train=train):
        losses = super_model.token_losses(batch)
        if train:
            loss.backward(losses, scales(losses))
        super_model.launched()
    return losses
