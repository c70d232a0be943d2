"""One job's step in plain torch, in the number format of its tensors: the definition of right."""

from collections.abc import Sequence

import torch

from tlora.kernels.adamw.orders import Order


def step(
    matrices: Sequence[Sequence[torch.Tensor]],
    order: Order,
    copies: Sequence[torch.Tensor | None] = (),
) -> torch.Tensor:
    """Update (value, gradient, first and second moment) of every matrix of the job, clear the
    gradients, and give their norm before clipping. A norm that is no number changes nothing but the
    gradients. `copies` has the copy of each value, which follows it, or None; what is no finite
    number in a copy's format, or in that of the values, is 0 there and makes the norm NaN."""
    norm = torch.stack([grad.square().sum() for _, grad, _, _ in matrices]).sum().sqrt()
    if norm.isfinite():
        coefficient = 1.0
        if order.max_norm is not None:
            coefficient = (order.max_norm / (norm + 1e-6)).clamp(max=1.0)
        for value, grad, exp_avg, exp_avg_sq in matrices:
            clipped = grad * coefficient
            value.mul_(1 - order.learning_rate * order.weight_decay)
            exp_avg.lerp_(clipped, 1 - order.beta1)
            exp_avg_sq.mul_(order.beta2).addcmul_(clipped, clipped, value=1 - order.beta2)
            correction1 = 1 - order.beta1**order.number
            correction2 = (1 - order.beta2**order.number) ** 0.5
            denominator = exp_avg_sq.sqrt() / correction2 + order.epsilon
            value.addcdiv_(exp_avg, denominator, value=-order.learning_rate / correction1)
        values = [value for value, _, _, _ in matrices]
        pairs = list(zip(copies, values, strict=True)) if copies else []
        followed = [(copy, value) for copy, value in pairs if copy is not None]
        for copy, value in followed:
            copy.copy_(value)
        written = [*values, *(copy for copy, _ in followed)]
        if not all(tensor.isfinite().all() for tensor in written):
            norm = torch.full_like(norm, torch.nan)
        for copy, _ in followed:
            copy.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    for _, grad, _, _ in matrices:
        grad.zero_()
    return norm
