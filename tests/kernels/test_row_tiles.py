"""Products in tiles of rows are the products."""

import pytest
import torch
import torch.nn.functional as F

from tlora.kernels.row_tiles import input_gradient, linear, tiles


def case(rows: int) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(rows)
    weights = [torch.randn(out, 9, generator=generator) for out in (5, 12)]
    x = torch.randn(rows, 9, generator=generator)
    return x, weights, [torch.randn(rows, len(weight), generator=generator) for weight in weights]


@pytest.mark.parametrize("rows", [1, 7, 8, 17])
def test_tiles_give_the_whole_product(rows: int) -> None:
    """Forward with a bias and backward of two linears, to rounding; not with a row left out."""
    x, weights, dy = case(rows)
    bias = torch.arange(5.0)
    torch.testing.assert_close(linear(x, weights[0], bias, 8), F.linear(x, weights[0], bias))
    whole = sum(dy_l @ weight for dy_l, weight in zip(dy, weights, strict=True))
    torch.testing.assert_close(input_gradient(dy, weights, 8), whole)
    torch.testing.assert_close(input_gradient(dy, weights), whole)
    dy[0][-1] = 0
    assert not torch.allclose(input_gradient(dy, weights, 8), whole)


@pytest.mark.parametrize("rows", [1, 7, 8, 17])
def test_every_tile_has_one_shape(rows: int) -> None:
    """The last one is filled up with zeros."""
    x, _, _ = case(rows)
    cut = tiles(x, 8)
    assert {tile.shape for tile in cut} == {(8, 9)}
    assert torch.equal(torch.cat(cut)[:rows], x) and not torch.cat(cut)[rows:].any()


def test_tiles_can_be_differentiated() -> None:
    """A head in tiles sends back the gradient of the whole head."""
    x, weights, dy = case(17)
    gradients = []
    for tile_rows in (0, 8):
        leaf = x.clone().requires_grad_()
        linear(leaf, weights[0], None, tile_rows).backward(dy[0])
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
