"""A product that gives a row other bits in another place is found, and computed in tiles."""

import pytest
import torch
from support.models import (
    largest_error,
    packed,
    random_adapter,
    sequences_of,
    super_gradients,
    super_model,
    tiny_model,
)

from tlora.core.errors import SpecError
from tlora.kernels import host_products, row_tiles
from tlora.model import row_probe
from tlora.model.linear import TiledLinear
from tlora.model.row_probe import bits_move, frozen_products, same_bits, settle_products

ROWS = 150


def nudged(y: torch.Tensor, first: int) -> torch.Tensor:
    """The last bits of the rows from `first` on are others, as if another kernel had made them."""
    rows = y.view(-1, y.shape[-1])
    rows[first:] *= 1 + 2**-22
    return y


def position_dependent(monkeypatch: pytest.MonkeyPatch, *, in_tiles: bool) -> None:
    """Forward products that favour their first 64 rows, or 8 rows of a tile."""
    monkeypatch.setattr(host_products, "_prefers_onednn", lambda: False)
    linear = row_tiles.F.linear

    def moving(x, weight, bias=None):
        return nudged(linear(x, weight, bias), 8 if in_tiles else 64)

    monkeypatch.setattr(row_tiles.F, "linear", moving)


def test_products_that_keep_their_bits_stay_whole() -> None:
    """The normal case: as many products as there are shapes, and no tiles."""
    model = super_model(tiny_model("llama"), per_sequence=True)
    report = settle_products(model, ROWS)
    assert report.tiled == []
    assert report.probed == len({product.signature for product in frozen_products(model)})
    assert report.probed < len(list(frozen_products(model)))
    assert not any(group.tile_rows for group in model.groups)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_a_product_whose_bits_move_is_computed_in_tiles(kind, monkeypatch) -> None:
    """Forward products that favour the first 64 rows: groups and head get tiles, and then compute
    what the untouched model computes, gradients too."""
    plain = tiny_model(kind)
    weights = random_adapter(plain, rank=3, seed=1)
    batch = packed({"a": sequences_of([40, 33, 25], seed=5)})
    expected = super_model(plain, per_sequence=True)
    expected.attach("a", weights, scale=1.0)
    gradients = super_gradients(expected, batch)["a"]
    model = super_model(plain, per_sequence=True)
    position_dependent(monkeypatch, in_tiles=False)
    report = settle_products(model, ROWS)
    assert len(report.tiled) == report.probed
    assert all(group.tile_rows == row_tiles.TILE_ROWS for group in model.groups)
    if model.head is None:
        assert isinstance(model.model.get_output_embeddings(), TiledLinear)
    else:
        assert model.head_tile_rows == row_tiles.TILE_ROWS
    model.attach("a", weights, scale=1.0)
    found = super_gradients(model, batch)["a"]
    assert all(largest_error(found[key], gradients[key]) < 1e-5 for key in gradients)


def test_a_backward_product_whose_bits_move_is_found(monkeypatch) -> None:
    """Only dY W moves: the groups get tiles, the head, whose gradient is its loss's, does not."""
    whole = row_tiles.input_gradient

    def moving(dy, weights, tile_rows=0):
        return whole(dy, weights, tile_rows) if tile_rows else nudged(whole(dy, weights), 64)

    monkeypatch.setattr(row_tiles, "input_gradient", moving)
    model = super_model(tiny_model("llama"), per_sequence=True)
    report = settle_products(model, ROWS)
    assert len(report.tiled) == report.probed - 1
    assert not model.head_tile_rows


def test_a_product_that_moves_in_tiles_too_is_refused(monkeypatch) -> None:
    """The message names the setting, the product and the way out."""
    model = super_model(tiny_model("llama"), per_sequence=True)
    position_dependent(monkeypatch, in_tiles=True)
    with pytest.raises(SpecError, match="exact isolation cannot be had on this machine") as caught:
        settle_products(model, ROWS)
    assert caught.value.field == "engine.isolation"
    assert "32 to 32 + 16 + 16" in str(caught.value) and "isolation: default" in str(caught.value)


def depends_on_last_row(rows: list[torch.Tensor], tile_rows: int) -> list[torch.Tensor]:
    return [rows[0] + 0.0 * rows[0][-1:] + rows[0][-1:].sum() * 1e-3]


def depends_on_oddness(rows: list[torch.Tensor], tile_rows: int) -> list[torch.Tensor]:
    y = rows[0].clone()
    y[1::2] *= 1 + 2**-22
    return [y]


def depends_on_last_place(rows: list[torch.Tensor], tile_rows: int) -> list[torch.Tensor]:
    y = rows[0].clone()
    y[-1] *= 1 + 2**-22
    return [y]


def independent(rows: list[torch.Tensor], tile_rows: int) -> list[torch.Tensor]:
    return [rows[0] * 3.0]


@pytest.mark.parametrize(
    ("compute", "moves"),
    [
        (depends_on_last_row, True),
        (depends_on_oddness, True),
        (depends_on_last_place, True),
        (independent, False),
    ],
)
@pytest.mark.parametrize("rows", [2, 101, 128])
def test_the_trials_see_company_and_place(compute, moves, rows) -> None:
    """One bit in one row is enough, whether a neighbour or the place makes it."""
    tried = row_probe.Pass([6], compute)
    assert bits_move(tried, rows, 0, torch.zeros(1)) is moves


def test_bits_are_compared_and_not_values() -> None:
    """Zeros of both signs differ; a NaN is itself."""
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_bits(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64))
