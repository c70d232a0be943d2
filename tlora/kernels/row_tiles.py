"""Frozen products over rows, whole or in tiles of a fixed number of rows.

A matrix product may cut its work by the number of rows, and so give a row other bits in another
place. A tile has one shape wherever its rows come from, the last one padded with zeros. Tiles cost
time, so they are for shapes that were seen to need them (model/row_probe.py).
"""

import torch
import torch.nn.functional as F

from tlora.kernels import host_products

TILE_ROWS = 64


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile_rows: int = 0
) -> torch.Tensor:
    """x W^T + bias for x of [rows, in]; in tiles unless `tile_rows` is 0."""
    if not tile_rows:
        return host_products.linear(x, weight, bias)
    cut = tiles(x, tile_rows)
    return torch.cat([host_products.linear(tile, weight, bias) for tile in cut])[: len(x)]


def input_gradient(
    dy: list[torch.Tensor], weights: list[torch.Tensor], tile_rows: int = 0
) -> torch.Tensor:
    """The sum of dY_l W_l over linears of one input; in tiles unless `tile_rows` is 0."""
    if tile_rows:
        cut = zip(*(tiles(dy_l, tile_rows) for dy_l in dy), strict=True)
        return torch.cat([input_gradient(list(parts), weights) for parts in cut])[: len(dy[0])]
    return host_products.input_gradient(dy, weights)


def add_linear(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, tile_rows: int = 0) -> None:
    """y += x W^T; whole, the product itself accumulates."""
    if tile_rows:
        y += linear(x, weight, None, tile_rows)
    else:
        y.addmm_(x, weight.T)


def add_input_gradient(
    dx: torch.Tensor, dy: list[torch.Tensor], weights: list[torch.Tensor], tile_rows: int = 0
) -> None:
    """dx += the sum of dY_l W_l; whole, the products themselves accumulate."""
    if tile_rows:
        dx += input_gradient(dy, weights, tile_rows)
        return
    for dy_l, weight in zip(dy, weights, strict=True):
        dx.addmm_(dy_l, weight)


def tiles(x: torch.Tensor, tile_rows: int) -> list[torch.Tensor]:
    """Every one of `tile_rows` rows."""
    cut = list(x.split(tile_rows))
    cut[-1] = F.pad(cut[-1], (0, 0, 0, tile_rows - len(cut[-1])))
    return cut
