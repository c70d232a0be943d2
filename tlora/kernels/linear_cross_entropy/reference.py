"""What linear cross-entropy computes, plainly: all logits at once."""

import torch
import torch.nn.functional as F


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
) -> torch.Tensor:
    """float32 (or wider) [N]: the cross-entropy of each row."""
    logits = F.linear(hidden, weight, bias)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), targets, reduction="none")
