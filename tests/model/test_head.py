"""Losses without all logits, where the head is a linear and nothing else."""

import pytest
import torch
import torch.nn.functional as F
from support.models import (
    SUPPORTED,
    packed,
    random_adapter,
    sequences_of,
    super_gradients,
    super_model,
    tiny_model,
)

from tlora.model import head as head_module
from tlora.model.super_model import SuperModel


def scene(kind: str, **settings: object):
    plain = tiny_model(kind, **settings)
    model = super_model(plain)
    model.attach("job", random_adapter(plain, rank=3, seed=1), scale=0.7)
    return model, packed({"job": sequences_of([19, 7, 23], seed=3)})


def both_losses(model: SuperModel, batch) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        with model.routed(batch, train=False):
            found = model.token_losses(batch)
        with model.routed(batch, train=False):
            logits = model.logits(batch)
    return found, F.cross_entropy(logits, batch.targets, reduction="none")


@pytest.mark.parametrize("kind", SUPPORTED)
def test_losses_are_the_cross_entropy_of_the_models_own_logits(kind: str) -> None:
    """For every architecture, by whichever way it goes."""
    found, own = both_losses(*scene(kind))
    assert (found - own).abs().max() <= 1e-5 * own.abs().max()


def test_models_that_bound_their_logits_go_by_all_logits() -> None:
    """Gemma 2's soft-cap, which a plain head would leave out; the others have a plain head."""
    plain = {kind: scene(kind)[0]._head is not None for kind in SUPPORTED}
    assert plain.pop("gemma2") is False
    assert all(plain.values()), plain
    assert scene("gemma2", final_logit_softcapping=None)[0]._head is not None


def test_gradients_are_those_of_all_logits() -> None:
    """The same nano-batch with the head that was found, and made to do without it."""
    model, batch = scene("llama")
    found = super_gradients(model, batch)["job"]
    model._head = None
    expected = super_gradients(model, batch)["job"]
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name
        assert gradient.any()


@pytest.mark.parametrize("tile_rows", [0, 64])
@pytest.mark.parametrize("most_rows", [7, 64, 1000])
def test_losses_in_tiles_are_those_of_the_rows(tile_rows, most_rows, monkeypatch) -> None:
    """Whatever the tile, the last one filled up or not; and the gradients with them."""
    head = scene("llama")[0].head
    assert head is not None
    monkeypatch.setattr(head_module, "rows_at_a_time", lambda *sizes, **format: most_rows)
    rows = torch.randn(130, head.weight.shape[1], requires_grad=True)
    targets = torch.arange(130) % len(head.weight)
    upstream = torch.linspace(-1, 1, 130)
    found, expected = head.losses_in_tiles(rows, targets, tile_rows), head.losses(rows, targets)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    (in_tiles,) = torch.autograd.grad(found, rows, upstream)
    (whole,) = torch.autograd.grad(expected, rows, upstream)
    assert (in_tiles - whole).abs().max() <= 1e-5 * whole.abs().max()
    assert (in_tiles - 1.01 * whole).abs().max() > 1e-5 * whole.abs().max()
