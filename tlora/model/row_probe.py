"""Whether a frozen product gives a row the same bits wherever it stands and whoever stands beside.

Exact isolation needs it, and no library promises it, so it is tried before a run on every product
that the run will use, at its number of rows. Rows change places among each other, among other
rows and before a padded tail. A product whose bits move is computed in tiles of rows
(kernels/row_tiles.py), which must pass the same trials.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers.pytorch_utils import Conv1D

from tlora.core.errors import SpecError
from tlora.kernels import row_tiles
from tlora.kernels.multi_lora.routes import kernels_serve
from tlora.kernels.row_tiles import TILE_ROWS
from tlora.model.head import PlainHead
from tlora.model.linear import Linear, SharedInput, TiledLinear
from tlora.model.super_model import SuperModel

ALIGNMENT_BYTES = 64
"""Of a weight's start: the kernels inside a product may differ by it."""

RANDOM_ORDERS = 2


@dataclass(frozen=True, slots=True)
class Pass:
    """One direction of a product: matrices of `widths` columns in, matrices out, row by row."""

    widths: list[int]
    compute: Callable[[list[torch.Tensor], int], list[torch.Tensor]]
    """Of the matrices and the rows of a tile, or 0 for none."""


@dataclass(frozen=True, slots=True)
class Product:
    """Forward and backward of frozen linears over one input."""

    name: str
    signature: object
    """Products of one signature run the same code on other numbers."""

    passes: list[Pass]
    like: torch.Tensor
    """For the number format and the device."""

    use_tiles: Callable[[int], None]
    """Computes it in tiles of so many rows from now on."""


@dataclass(frozen=True, slots=True)
class RowReport:
    """What came of the trials."""

    probed: int
    """Distinct products."""

    tiled: list[str]
    """Those that are computed in tiles."""


def settle_products(model: SuperModel, num_rows: int) -> RowReport:
    """Find tiles for the products that need them. Raises SpecError if tiles do not help."""
    chosen: dict[object, int] = {}
    tiled: list[str] = []
    for product in frozen_products(model):
        tile_rows = chosen.get(product.signature)
        if tile_rows is None:
            tile_rows = chosen[product.signature] = choose_tile_rows(product, num_rows)
            tiled += [product.name] if tile_rows else []
        if tile_rows:
            product.use_tiles(tile_rows)
    return RowReport(len(chosen), tiled)


def choose_tile_rows(product: Product, num_rows: int) -> int:
    """0 if the whole product keeps its bits, else the rows of tiles that do."""
    for tile_rows in (0, TILE_ROWS):
        if not any(bits_move(each, num_rows, tile_rows, product.like) for each in product.passes):
            return tile_rows
    raise SpecError(
        f"exact isolation cannot be had on this machine: the product {product.name} over "
        f"{num_rows} rows gives a row other bits in another place, and so do tiles of {TILE_ROWS} "
        "rows; use `isolation: default`, which is right to rounding",
        field="engine.isolation",
    )


@torch.no_grad()
def bits_move(tried: Pass, num_rows: int, tile_rows: int, like: torch.Tensor) -> bool:
    """Whether any row of any output differs in any trial from what it was at first."""
    # On the device itself: a host would take seconds for numbers that need be no others.
    generator = torch.Generator(like.device).manual_seed(num_rows)

    def noise() -> list[torch.Tensor]:
        shapes = [(num_rows, width) for width in tried.widths]
        rows = [torch.randn(*s, generator=generator, device=like.device) for s in shapes]
        return [each.to(like) for each in rows]

    first = noise()
    expected = tried.compute(first, tile_rows)
    for trial in trials(num_rows, torch.Generator().manual_seed(num_rows)):
        order, stays = trial.order.to(like.device), trial.stays.to(like.device)
        others = [company * trial.loudness for company in noise()]
        moved = [
            torch.where(stays[:, None], rows[order], company)
            for rows, company in zip(first, others, strict=True)
        ]
        for found, reference in zip(tried.compute(moved, tile_rows), expected, strict=True):
            if not same_bits(found[stays], reference[order[stays]]):
                return True
    return False


@dataclass(frozen=True, slots=True)
class Trial:
    order: torch.Tensor
    """Which row stands where."""

    stays: torch.Tensor
    """False where another row stands instead."""

    loudness: float
    """What the other rows are multiplied by; 0 makes them padding."""


def trials(num_rows: int, generator: torch.Generator) -> Iterator[Trial]:
    """Every row by one place before a padded tail; all backwards; orders at random, among louder
    company."""
    rows = torch.arange(num_rows)
    yield Trial(rows.roll(1), rows < num_rows - num_rows // 4, loudness=0.0)
    yield Trial(rows.flip(0), torch.ones(num_rows, dtype=torch.bool), loudness=1.0)
    for _ in range(RANDOM_ORDERS):
        stays = torch.rand(num_rows, generator=generator) < 0.7
        yield Trial(torch.randperm(num_rows, generator=generator), stays, loudness=100.0)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Unlike torch.equal, zeros of both signs differ and a NaN equals itself."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.view(bits), other.view(bits))


def frozen_products(model: SuperModel) -> Iterator[Product]:
    """The groups that carry adapters, the head, then what linears the model has besides."""
    for group in model.groups:
        yield _group_product(group)
    head = model.head
    if head is not None:
        yield _head_product(model, head)
    # A list, for tiles take their place among the modules.
    for path, module in list(model.model.named_modules()):
        is_head = head is not None and module is model.model.get_output_embeddings()
        if isinstance(module, Linear) and not is_head:
            yield _linear_product(model, path, module)


def _group_product(group: SharedInput) -> Product:
    if group.in_fp8:
        raise SpecError(
            "exact isolation cannot be had of products in FP8; use base.quantization: nf4 or none",
            field="engine.isolation",
        )
    weights = group.full_weights()
    outs = [weight.shape[0] for weight in weights]
    into = weights[0].shape[1]

    def add_forward(rows: list[torch.Tensor], tile_rows: int) -> list[torch.Tensor]:
        y = [rows[0].new_zeros(len(rows[0]), out) for out in outs]
        for y_l, weight in zip(y, weights, strict=True):
            row_tiles.add_linear(y_l, rows[0], weight, tile_rows)
        return y

    def add_backward(rows: list[torch.Tensor], tile_rows: int) -> list[torch.Tensor]:
        dx = rows[0].new_zeros(len(rows[0]), into)
        row_tiles.add_input_gradient(dx, rows, weights, tile_rows)
        return [dx]

    def forward(rows: list[torch.Tensor], tile_rows: int) -> list[torch.Tensor]:
        pairs = zip(weights, group.biases, strict=True)
        return [row_tiles.linear(rows[0], weight, bias, tile_rows) for weight, bias in pairs]

    def backward(rows: list[torch.Tensor], tile_rows: int) -> list[torch.Tensor]:
        return [row_tiles.input_gradient(rows, weights, tile_rows)]

    def use_tiles(tile_rows: int) -> None:
        group.tile_rows = tile_rows

    # Where kernels serve, adapters come first and the products are added to them.
    added = kernels_serve(weights[0].device, len(weights))
    return Product(
        name=f"{into} to {' + '.join(map(str, outs))}",
        signature=("group", _signature(weights, group.biases)),
        passes=[
            Pass([into], add_forward if added else forward),
            Pass(outs, add_backward if added else backward),
        ],
        like=weights[0],
        use_tiles=use_tiles,
    )


def _head_product(model: SuperModel, head: PlainHead) -> Product:
    """With the loss behind it, as a run computes both; every row has the same target."""
    out, into = head.weight.shape

    def losses_and_gradient(rows: list[torch.Tensor], tile_rows: int) -> list[torch.Tensor]:
        with torch.enable_grad():
            x = rows[0].detach().requires_grad_()
            targets = torch.zeros(len(x), dtype=torch.int64, device=x.device)
            losses = head.losses_in_tiles(x, targets, tile_rows)
        (gradient,) = torch.autograd.grad(losses, x, torch.ones_like(losses))
        return [losses.detach()[:, None], gradient]

    def use_tiles(tile_rows: int) -> None:
        model.head_tile_rows = tile_rows

    return Product(
        name=f"{into} to {out} (the head)",
        signature=("head", _signature([head.weight], [head.bias])),
        passes=[Pass([into], losses_and_gradient)],
        like=head.weight,
        use_tiles=use_tiles,
    )


def _linear_product(model: SuperModel, path: str, linear: Linear) -> Product:
    weight = linear.weight.T if isinstance(linear, Conv1D) else linear.weight
    out, into = weight.shape

    def forward(rows: list[torch.Tensor], tile_rows: int) -> list[torch.Tensor]:
        module = TiledLinear(linear, tile_rows) if tile_rows else linear
        # Shaped as the model calls it.
        return [module(rows[0][None])[0]]

    def backward(rows: list[torch.Tensor], tile_rows: int) -> list[torch.Tensor]:
        with torch.enable_grad():
            x = weight.new_zeros(len(rows[0]), into).requires_grad_()
            y = forward([x], tile_rows)[0]
        return list(torch.autograd.grad(y, x, rows[0]))

    return Product(
        name=f"{into} to {out} ({path})",
        signature=("linear", _signature([weight], [linear.bias])),
        passes=[Pass([into], forward), Pass([out], backward)],
        like=weight,
        use_tiles=lambda tile_rows: model.model.set_submodule(path, TiledLinear(linear, tile_rows)),
    )


def _signature(weights: list[torch.Tensor], biases: list[torch.Tensor | None]) -> object:
    return tuple(
        (
            weight.dtype,
            weight.shape,
            weight.stride(),
            weight.data_ptr() % ALIGNMENT_BYTES,
            bias is None or bias.data_ptr() % ALIGNMENT_BYTES,
        )
        for weight, bias in zip(weights, biases, strict=True)
    )
