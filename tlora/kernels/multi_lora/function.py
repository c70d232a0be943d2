"""The one entry to multi-LoRA: a group of frozen linears over one input, plus every job's adapters.

Two opaque operators, so that `torch.compile` sees through: forward computes the linears and adds
the adapters; backward returns dX and accumulates dA and dB straight into the pool's gradients.
Frozen weights get none; quantised ones are unpacked in here, so that nothing keeps them in full
from forward to backward. A route says which kernels run: those of a CPU (native.py, cpu.py), or
Triton's.
"""

import torch

from tlora.kernels import row_tiles
from tlora.kernels.multi_lora import cpu, native
from tlora.kernels.multi_lora.routes import Route, blocks_of
from tlora.kernels.multi_lora.tables import FIXED_COLUMNS, read_table
from tlora.kernels.quantised import dense, fp8

# Counters among `extra` are zero before and after every call, so no operator changes them.
library = torch.library.Library("tlora", "FRAGMENT")
library.define(
    "multi_lora_forward(Tensor x, Tensor[] weights, Tensor?[] biases, bool transposed, Tensor a, "
    "Tensor[] b, Tensor table, Tensor extra, Tensor layout, Tensor s_like, Tensor rows, "
    "Tensor linears, int tile_rows=0, Tensor? kept=None, Tensor[]? scales=None) -> Tensor[]"
)
library.define(
    "multi_lora_backward(Tensor x, Tensor[] dy, Tensor s, Tensor[] weights, bool transposed, "
    "Tensor a, Tensor[] b, Tensor(a!) grad_a, Tensor(b!)[] grad_b, Tensor table, Tensor extra, "
    "Tensor layout, Tensor s_like, Tensor rows, Tensor linears, bool needs_dx, int tile_rows=0, "
    "Tensor[]? scales=None, Tensor? turned=None) -> Tensor"
)


def _forward(
    x, weights, biases, transposed, a, b, table, extra, layout, s_like, rows, linears, tile_rows=0,
    kept=None, scales=None,
):  # fmt: skip
    """The outputs, and S for backward; nothing in its place if it was `kept`."""
    route = Route(table, extra, layout, s_like)
    y = None
    if scales and fp8.multiplies(x, weights):
        y = fp8.linears(x, weights, scales, biases)
    bases = [] if y else _in_full(x, weights, transposed, b, scales)
    if not route.is_table:
        where = (route, rows, linears.tolist())
        return _triton_forward(x, bases, biases, a, b, *where, tile_rows, kept, y)
    y = y or [
        row_tiles.linear(x, base, bias, tile_rows) for base, bias in zip(bases, biases, strict=True)
    ]
    s = a.new_empty(x.shape[0], s_like.shape[1]) if kept is None else kept
    if read_table(table, extra):
        kernels = native.serving(x, a, *b, *y) or cpu
        kernels.add_forward(y, s, x, a, b, route, rows, linears, is_written=kept is not None)
    return [*y, s if kept is None else x.new_empty(0)]


def _triton_forward(x, bases, biases, a, b, route, rows, linears, tile_rows, kept, y):
    """`y`: the frozen products, if they are there already."""
    # Imported where it runs: a machine without a GPU need not have Triton.
    from tlora.kernels.multi_lora import triton_forward

    x, blocks = x.contiguous(), blocks_of(route)
    if y is not None:
        s = triton_forward.add_forward(y, x, a, b, blocks, rows, linears, s=kept)
        return [*y, s if kept is None else x.new_empty(0)]
    y = [x.new_empty(x.shape[0], base.shape[0]) for base in bases]
    no_bias = all(bias is None for bias in biases)
    if no_bias and _takes_update("forward", blocks, x, a, bases, tile_rows):
        from tlora.kernels.multi_lora import triton_product

        s = triton_product.linears_with_update(y, x, bases, a, b, blocks, rows, linears, s=kept)
        return [*y, s if kept is None else x.new_empty(0)]
    # Adapters first, and the frozen products on top: one read of y less (README.md).
    s = triton_forward.add_forward(
        y, x, a, b, blocks, rows, linears, write=True, biases=biases, s=kept
    )
    for y_l, base in zip(y, bases, strict=True):
        row_tiles.add_linear(y_l, x, base, tile_rows)
    return [*y, s if kept is None else x.new_empty(0)]


def _backward(
    x, dy, s, weights, transposed, a, b, grad_a, grad_b, table, extra, layout, s_like, rows,
    linears, needs_dx, tile_rows=0, scales=None, turned=None,
):  # fmt: skip
    route = Route(table, extra, layout, s_like)
    dx, bases = None, []
    if needs_dx and scales and fp8.multiplies(x, weights):
        dx = fp8.input_gradient(dy, scales, fp8.turned(weights) if turned is None else turned)
    elif needs_dx:
        bases = _in_full(x, weights, transposed, b, scales)
    if not route.is_table:
        where = (route, rows, linears.tolist())
        dx = _triton_backward(x, dy, s, bases, a, b, grad_a, grad_b, *where, tile_rows, dx)
        return x.new_empty(0) if dx is None else dx
    if bases:
        dx = row_tiles.input_gradient(dy, bases, tile_rows)
    if read_table(table, extra):
        # As forward, whose S has another order in the other's memory: dY has the format of Y.
        kernels = native.serving(x, a, *b, *dy) or cpu
        kernels.add_backward(dx, x, dy, s, a, b, grad_a, grad_b, route, rows, linears)
    return x.new_empty(0) if dx is None else dx


def _triton_backward(
    x, dy, s, bases, a, b, grad_a, grad_b, route, rows, linears, tile_rows, product
):
    """`product`: the frozen products for dX, if they are there already. None of them and no bases:
    nobody asks for dX."""
    from tlora.kernels.multi_lora import triton_backward, triton_pages

    x, blocks = x.contiguous(), blocks_of(route)
    dx = torch.empty_like(x) if bases else product
    inside = bool(bases) and _takes_update("backward", blocks, x, a, bases, tile_rows)
    slots = triton_pages.new_slots(s) if inside else None
    triton_backward.add_backward(
        None if inside else dx, x, dy, s, a, b, grad_a, grad_b, blocks, rows, linears,
        write=product is None, slots=slots,
    )  # fmt: skip
    if dx is None or product is not None:
        return dx
    if slots is not None:
        from tlora.kernels.multi_lora import triton_product

        triton_product.input_gradient_with_update(dx, dy, bases, slots, a, blocks)
    else:
        row_tiles.add_input_gradient(dx, dy, bases, tile_rows)
    return dx


def _takes_update(way, blocks, x, a, weights, tile_rows) -> bool:
    """Whether products with these weights, [out, in], have the update inside. Only copies in half
    precision are known to hold numbers alone."""
    half = x.dtype in (torch.bfloat16, torch.float16) and a.dtype == x.dtype
    alike = all(each.is_contiguous() and each.dtype == x.dtype for each in weights)
    return way in blocks.layout.inside and half and alike and not tile_rows


def _in_full(x, weights, transposed: bool, b, scales) -> list[torch.Tensor]:
    """The frozen weights, [out, in]; quantised ones in the format of x."""
    if scales:
        shapes = [(b_l.shape[1], x.shape[1]) for b_l in b]
        kept = zip(weights, scales, shapes, strict=True)
        return [dense(weight, scale, shape, x.dtype) for weight, scale, shape in kept]
    return [weight.T if transposed else weight for weight in weights]


library.impl("multi_lora_forward", _forward, "CompositeExplicitAutograd")
library.impl("multi_lora_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("tlora::multi_lora_forward", lib=library)
def _fake_forward(
    x, weights, biases, transposed, a, b, table, extra, layout, s_like, rows, linears, tile_rows=0,
    kept=None, scales=None,
):  # fmt: skip
    y = [x.new_empty(x.shape[0], b_l.shape[1]) for b_l in b]
    if kept is not None:
        return [*y, x.new_empty(0)]
    like = a if Route(table, extra, layout, s_like).is_table else x
    return [*y, like.new_empty(x.shape[0], s_like.shape[1])]


@torch.library.register_fake("tlora::multi_lora_backward", lib=library)
def _fake_backward(
    x, dy, s, weights, transposed, a, b, grad_a, grad_b, table, extra, layout, s_like, rows,
    linears, needs_dx, tile_rows=0, scales=None, turned=None,
):  # fmt: skip
    return x.new_empty(x.shape if needs_dx else 0)


class MultiLora(torch.autograd.Function):
    """Saves x and S; dropout masks are made again in backward. With `keep` S is an output too."""

    @staticmethod
    def forward(
        ctx, x, weights, biases, transposed, a, b, grad_a, grad_b, route, rows, linears, tile_rows,
        kept, keep, scales, turned,
    ):  # fmt: skip
        *y, s = torch.ops.tlora.multi_lora_forward(
            x, weights, biases, transposed, a, b, *route, rows, linears, tile_rows, kept, scales
        )
        s = s if kept is None else kept
        table, extra, layout, s_like = route
        quantised = [*(scales or ()), *([] if turned is None else [turned])]
        ctx.save_for_backward(
            x, s, a, table, layout, s_like, rows, linears, *weights, *b, *quantised
        )
        # Not saved tensors: kernels change them, and a second backward would be refused for it.
        ctx.grad_a, ctx.grad_b, ctx.extra = grad_a, grad_b, extra
        ctx.transposed, ctx.tile_rows = transposed, tile_rows
        ctx.num_linears = len(weights)
        if not keep:
            return tuple(y)
        ctx.mark_non_differentiable(s)
        return (*y, s)

    @staticmethod
    def backward(ctx, *dy):
        x, s, a, table, layout, s_like, rows, linears, *lists = ctx.saved_tensors
        n = ctx.num_linears
        needs_dx = ctx.needs_input_grad[0]
        dx = torch.ops.tlora.multi_lora_backward(
            x,
            [dy_l.contiguous() for dy_l in dy[:n]],
            s,
            lists[:n],
            ctx.transposed,
            a,
            lists[n : 2 * n],
            ctx.grad_a,
            ctx.grad_b,
            table,
            ctx.extra,
            layout,
            s_like,
            rows,
            linears,
            needs_dx,
            ctx.tile_rows,
            lists[2 * n : 3 * n] or None,
            lists[3 * n] if len(lists) > 3 * n else None,
        )
        return dx if needs_dx else None, *(None for _ in range(15))


def multi_lora(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    *,
    a: torch.Tensor,
    b: list[torch.Tensor],
    grad_a: torch.Tensor,
    grad_b: list[torch.Tensor],
    route: Route,
    rows: torch.Tensor,
    linears: torch.Tensor,
    transposed: bool = False,
    tile_rows: int = 0,
    kept: torch.Tensor | None = None,
    keep: bool = False,
    scales: list[torch.Tensor] | None = None,
    turned: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """y_l = x W_l^T + bias_l + the adapter of each token's job, for the linears l of a group.

    x            [tokens, in], any floating type
    weights      [out_l, in] ([in, out_l] if transposed), frozen; or the values of quantised ones
    a, b         the pool: [rank rows, in], and per linear [rank rows, out_l]
    grad_a, ...  of the same shapes; backward adds to them. `a` must require a gradient, to be part
                 of the graph; it is never given one of its own
    route        the segments (routes.py)
    rows         int32 [tokens]: each token's place in its job's batch, which keys dropout
    linears      int64 in host memory: a number per linear, which keys dropout
    tile_rows    rows of a tile of the frozen products, or 0 for whole ones (row_tiles.py)
    keep         give S = drop(x) A^T too, after the outputs
    kept         S of the same x, given back: it is not computed again
    scales       of quantised weights (kernels/quantised)
    turned       weights in FP8 once more, as products for dX read them; made anew if they need it
    """
    if x.dim() != 2 or x.shape[1] != a.shape[1]:
        raise ValueError(f"x must be [tokens, {a.shape[1]}], got {list(x.shape)}")
    n = len(weights)
    if not (len(biases) == len(b) == len(grad_b) == len(linears) == n):
        raise ValueError(f"{n} weights need as many biases, b, grad_b and linears")
    grads_of = zip([grad_a, *grad_b], [a, *b], strict=True)
    if any(grad.shape != values.shape for grad, values in grads_of):
        raise ValueError("grad_a and grad_b must have the shapes of a and b")
    if route.is_table and route.table.shape[1] != FIXED_COLUMNS + 2 * n:
        raise ValueError(f"the table is for another number of linears than {n}")
    if rows.shape[0] != x.shape[0]:
        raise ValueError(f"rows has {rows.shape[0]} entries for {x.shape[0]} tokens")
    # Kernels read memory as what it should be.
    if rows.dtype != torch.int32 or linears.dtype != torch.int64:
        raise ValueError(f"rows must be int32 and linears int64, not {rows.dtype}, {linears.dtype}")
    return MultiLora.apply(
        x, weights, biases, transposed, a, b, grad_a, grad_b, route, rows, linears, tile_rows,
        kept, keep, scales, turned,
    )  # fmt: skip
