"""A linear whose weight is held in fewer bits (kernels/quantised).

The super-model takes its weight over like any other's. Until then it computes by itself what will
be computed there, so that the probe can compare the two.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tlora.kernels.quantised import QuantisedWeight, dense, fp8


class QuantisedLinear(nn.Module):
    values: torch.Tensor
    scales: torch.Tensor

    def __init__(self, kept: QuantisedWeight, replaced: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("values", kept.values)
        self.register_buffer("scales", kept.scales)
        self.bias = replaced.bias
        self.in_features = replaced.in_features
        self.out_features = replaced.out_features
        self.dtype = replaced.weight.dtype
        """What the weight was held in, and activations are."""

    @property
    def kept(self) -> QuantisedWeight:
        return QuantisedWeight(self.values, self.scales)

    @property
    def weight(self) -> torch.Tensor:
        """In full, made anew."""
        return dense(*self.kept, (self.out_features, self.in_features), self.dtype)

    def in_full(self) -> nn.Linear:
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.weight, requires_grad=False)
        linear.bias = self.bias
        return linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        if fp8.multiplies(rows, [self.values]):
            (y,) = fp8.linears(rows, [self.values], [self.scales], [self.bias])
        else:
            shape = (self.out_features, self.in_features)
            y = F.linear(rows, dense(*self.kept, shape, x.dtype), self.bias)
        return y.view(*x.shape[:-1], -1)
