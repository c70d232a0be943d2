"""Cross-entropy of a frozen output head, a few rows at a time.

A row's gradient is (softmax(logits) - onehot(target)) W times what its loss counts, and all but
that factor is known in forward: it is computed while the rows' logits are at hand, so that these
are made once and thrown away. Backward is one multiplication per row.

Where Triton serves, one kernel per chunk turns logits into losses and errors (triton_softmax.py);
elsewhere torch does.
"""

import torch
import torch.nn.functional as F

from tlora.kernels import host_products
from tlora.kernels.multi_lora.routes import triton_serves

HOST_BYTES = 2**20
"""float32 logits at hand on a CPU: they should stay in its caches."""

DEVICE_BYTES = 2**29
"""float32 logits at hand on a device without the kernel; some three times this is held."""

FUSED_BYTES = 2**30
"""Logits at hand with the kernel, which needs nothing beside them. 4,096 rows of a vocabulary of
128,256 in bf16, enough to keep both products full: the gradient's, of 4,096 by 2,048 or 4,096, is
cut into two or four tiles of 128 by 256 per multiprocessor of an H200."""

MIN_ROWS = 64
"""Fewer make the products slow."""

TILE_ROWS = 128
"""Of a product on a GPU: chunks are whole tiles."""


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """float32 (float64 for float64) [N]: the cross-entropy of every row.

    hidden      [N, in]; the only input that gets a gradient
    weight      [vocabulary, in], frozen
    targets     int64 [N]
    chunk_rows  rows whose logits exist at a time; chosen by size if it is None
    """
    if hidden.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden must be [rows, {weight.shape[1]}], got {list(hidden.shape)}")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"{len(targets)} targets for {len(hidden)} rows")
    fused = triton_serves(hidden.device) and hidden.dtype != torch.float64
    if chunk_rows is None:
        chunk_rows = rows_at_a_time(
            len(weight), hidden.device, fused_itemsize=hidden.dtype.itemsize if fused else None
        )
    return LinearCrossEntropy.apply(hidden, weight, bias, targets, chunk_rows, fused)


def rows_at_a_time(
    vocabulary: int, device: torch.device, *, fused_itemsize: int | None = None
) -> int:
    """`fused_itemsize`: bytes of a logit, where the kernel runs."""
    if fused_itemsize is not None:
        rows = FUSED_BYTES // (fused_itemsize * vocabulary)
        return max(TILE_ROWS, rows // TILE_ROWS * TILE_ROWS)
    budget = HOST_BYTES if device.type == "cpu" else DEVICE_BYTES
    return max(MIN_ROWS, budget // (4 * vocabulary))


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, chunk_rows, fused):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        losses = hidden.new_empty(len(hidden), dtype=wide)
        ctx.has_gradient = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if ctx.has_gradient else None
        write = write_fused if fused else write_plain
        write(losses, gradient, hidden, weight, bias, targets, chunk_rows)
        ctx.save_for_backward(hidden.new_empty(0) if gradient is None else gradient)
        return losses

    @staticmethod
    def backward(ctx, *gradients):
        (factors,) = gradients
        (gradient,) = ctx.saved_tensors
        scaled = gradient * factors[:, None].to(gradient.dtype) if ctx.has_gradient else None
        return scaled, None, None, None, None, None


def write_plain(
    losses: torch.Tensor,
    gradient: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    chunk_rows: int,
) -> None:
    """Writes the losses, and the gradient of each with respect to its row if that is wanted."""
    for start in range(0, len(hidden), chunk_rows):
        rows = slice(start, start + chunk_rows)
        logits = host_products.linear(hidden[rows], weight, bias).to(losses.dtype)
        log_softmax = F.log_softmax(logits, dim=1)
        chosen = targets[rows, None]
        losses[rows] = log_softmax.gather(1, chosen)[:, 0].neg_()
        if gradient is not None:
            error = log_softmax.exp_()
            error.scatter_add_(1, chosen, error.new_full(chosen.shape, -1.0))
            gradient[rows] = host_products.input_gradient([error.to(weight.dtype)], [weight])


def write_fused(
    losses: torch.Tensor,
    gradient: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    chunk_rows: int,
) -> None:
    """The same, with the errors written over the logits."""
    # Imported where it runs: a machine without a GPU need not have Triton.
    from tlora.kernels.linear_cross_entropy.triton_softmax import cross_entropy, new_logits

    held = new_logits(min(chunk_rows, len(hidden)), len(weight), hidden)
    targets = targets.contiguous()
    for start in range(0, len(hidden), chunk_rows):
        rows = slice(start, start + chunk_rows)
        x = hidden[rows]
        logits = held[: len(x)]
        if bias is None:
            torch.mm(x, weight.T, out=logits)
        else:
            torch.addmm(bias, x, weight.T, out=logits)
        cross_entropy(losses[rows], logits, targets[rows], gradient=gradient is not None)
        if gradient is not None:
            torch.mm(logits, weight, out=gradient[rows])
