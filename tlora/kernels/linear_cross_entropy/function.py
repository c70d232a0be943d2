"""Cross-entropy of a frozen output head, a few rows at a time.

A row's gradient is (softmax(logits) - onehot(target)) W times what its loss counts, and all but
that factor is known in forward: it is computed while the rows' logits are at hand, so that these
are made once and thrown away. Backward is one multiplication per row.
"""

import torch
import torch.nn.functional as F

HOST_BYTES = 2**20
"""Logits at hand on a CPU: they should stay in its caches."""

DEVICE_BYTES = 2**29

MIN_ROWS = 64
"""Fewer make the products slow."""


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
    rows = rows_at_a_time(len(weight), hidden.device) if chunk_rows is None else chunk_rows
    return LinearCrossEntropy.apply(hidden, weight, bias, targets, rows)


def rows_at_a_time(vocabulary: int, device: torch.device) -> int:
    budget = HOST_BYTES if device.type == "cpu" else DEVICE_BYTES
    return max(MIN_ROWS, budget // (4 * vocabulary))


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, chunk_rows):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        losses = hidden.new_empty(len(hidden), dtype=wide)
        ctx.has_gradient = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if ctx.has_gradient else hidden.new_empty(0)
        for start in range(0, len(hidden), chunk_rows):
            rows = slice(start, start + chunk_rows)
            logits = F.linear(hidden[rows], weight, bias).to(wide)
            log_softmax = F.log_softmax(logits, dim=1)
            chosen = targets[rows, None]
            losses[rows] = log_softmax.gather(1, chosen)[:, 0].neg_()
            if ctx.has_gradient:
                error = log_softmax.exp_()
                error.scatter_add_(1, chosen, error.new_full(chosen.shape, -1.0))
                torch.mm(error.to(weight.dtype), weight, out=gradient[rows])
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx, *gradients):
        (factors,) = gradients
        (gradient,) = ctx.saved_tensors
        scaled = gradient * factors[:, None].to(gradient.dtype) if ctx.has_gradient else None
        return scaled, None, None, None, None
