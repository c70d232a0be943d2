"""The one entry to multi-LoRA: a group of frozen linears over one input, plus every job's adapters.

Two opaque operators, so that `torch.compile` sees through: forward computes the linears and adds
the adapters; backward returns dX and accumulates dA and dB straight into the pool's gradients.
Frozen weights get none.
"""

import torch

from tlora.kernels import row_tiles
from tlora.kernels.multi_lora import cpu
from tlora.kernels.multi_lora.tables import FIXED_COLUMNS, read_table

library = torch.library.Library("tlora", "FRAGMENT")
library.define(
    "multi_lora_forward(Tensor x, Tensor[] weights, Tensor?[] biases, bool transposed, Tensor a, "
    "Tensor[] b, Tensor table, Tensor scales, Tensor rows, int[] linears, int tile_rows=0) "
    "-> Tensor[]"
)
library.define(
    "multi_lora_backward(Tensor x, Tensor[] dy, Tensor[] weights, bool transposed, Tensor a, "
    "Tensor[] b, Tensor(a!) grad_a, Tensor(b!)[] grad_b, Tensor table, Tensor scales, Tensor rows, "
    "int[] linears, bool needs_dx, int tile_rows=0) -> Tensor"
)


def _forward(x, weights, biases, transposed, a, b, table, scales, rows, linears, tile_rows=0):
    y = [
        row_tiles.linear(x, weight.T if transposed else weight, bias, tile_rows)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    cpu.add_forward(y, x, a, b, read_table(table, scales), rows, linears)
    return y


def _backward(
    x,
    dy,
    weights,
    transposed,
    a,
    b,
    grad_a,
    grad_b,
    table,
    scales,
    rows,
    linears,
    needs_dx,
    tile_rows=0,
):
    dx = None
    if needs_dx:
        bases = [weight.T if transposed else weight for weight in weights]
        dx = row_tiles.input_gradient(dy, bases, tile_rows)
    cpu.add_backward(dx, x, dy, a, b, grad_a, grad_b, read_table(table, scales), rows, linears)
    return x.new_empty(0) if dx is None else dx


library.impl("multi_lora_forward", _forward, "CompositeExplicitAutograd")
library.impl("multi_lora_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("tlora::multi_lora_forward", lib=library)
def _fake_forward(x, weights, biases, transposed, a, b, table, scales, rows, linears, tile_rows=0):
    return [x.new_empty(len(x), weight.shape[1 if transposed else 0]) for weight in weights]


@torch.library.register_fake("tlora::multi_lora_backward", lib=library)
def _fake_backward(
    x,
    dy,
    weights,
    transposed,
    a,
    b,
    grad_a,
    grad_b,
    table,
    scales,
    rows,
    linears,
    needs_dx,
    tile_rows=0,
):
    return x.new_empty(x.shape if needs_dx else 0)


class MultiLora(torch.autograd.Function):
    """Saves x and nothing of its size besides: S and the dropout masks are made again in
    backward."""

    @staticmethod
    def forward(
        ctx,
        x,
        weights,
        biases,
        transposed,
        a,
        b,
        grad_a,
        grad_b,
        table,
        scales,
        rows,
        linears,
        tile_rows,
    ):
        ctx.save_for_backward(x, a, table, scales, rows, *weights, *b)
        # Not saved tensors: every backward changes them, and a second one would be refused for it.
        ctx.grad_a, ctx.grad_b = grad_a, grad_b
        ctx.transposed, ctx.linears, ctx.tile_rows = transposed, linears, tile_rows
        return tuple(
            torch.ops.tlora.multi_lora_forward(
                x, weights, biases, transposed, a, b, table, scales, rows, linears, tile_rows
            )
        )

    @staticmethod
    def backward(ctx, *dy):
        x, a, table, scales, rows, *lists = ctx.saved_tensors
        n = len(ctx.linears)
        needs_dx = ctx.needs_input_grad[0]
        dx = torch.ops.tlora.multi_lora_backward(
            x,
            [dy_l.contiguous() for dy_l in dy],
            lists[:n],
            ctx.transposed,
            a,
            lists[n:],
            ctx.grad_a,
            ctx.grad_b,
            table,
            scales,
            rows,
            ctx.linears,
            needs_dx,
            ctx.tile_rows,
        )
        return dx if needs_dx else None, *(None for _ in range(12))


def multi_lora(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    *,
    a: torch.Tensor,
    b: list[torch.Tensor],
    grad_a: torch.Tensor,
    grad_b: list[torch.Tensor],
    table: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor,
    linears: list[int],
    transposed: bool = False,
    tile_rows: int = 0,
) -> tuple[torch.Tensor, ...]:
    """y_l = x W_l^T + bias_l + the adapter of each token's job, for the linears l of a group.

    x            [tokens, in], any floating type
    weights      [out_l, in] ([in, out_l] if transposed), frozen
    a, b         the pool: [rank rows, in], and per linear [rank rows, out_l]
    grad_a, ...  of the same shapes; backward adds to them. `a` must require a gradient, to be part
                 of the graph; it is never given one of its own
    table, scales  the segments (tables.py)
    rows         int32 [tokens]: each token's place in its job's batch, which keys dropout
    linears      a number per linear, which keys dropout
    tile_rows    rows of a tile of the frozen products, or 0 for whole ones (row_tiles.py)
    """
    if x.dim() != 2 or x.shape[1] != a.shape[1]:
        raise ValueError(f"x must be [tokens, {a.shape[1]}], got {list(x.shape)}")
    n = len(weights)
    if not (len(biases) == len(b) == len(grad_b) == len(linears) == n):
        raise ValueError(f"{n} weights need as many biases, b, grad_b and linears")
    grads_of = zip([grad_a, *grad_b], [a, *b], strict=True)
    if any(grad.shape != values.shape for grad, values in grads_of):
        raise ValueError("grad_a and grad_b must have the shapes of a and b")
    if table.shape[1] != FIXED_COLUMNS + 2 * n:
        raise ValueError(f"the table is for another number of linears than {n}")
    if len(rows) != len(x):
        raise ValueError(f"rows has {len(rows)} entries for {len(x)} tokens")
    return MultiLora.apply(
        x,
        weights,
        biases,
        transposed,
        a,
        b,
        grad_a,
        grad_b,
        table,
        scales,
        rows,
        linears,
        tile_rows,
    )
