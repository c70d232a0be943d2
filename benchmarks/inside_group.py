"""The same linears with the adapters' update inside the frozen products: of Y (`forward`), of dX
(`backward`, without dropout), or of those that the settings choose (`inside`)."""

from dataclasses import replace

import torch
from linear_group import DEVICE, Case, Group

from tlora.kernels.multi_lora import triton_backward as backward
from tlora.kernels.multi_lora import triton_product
from tlora.kernels.multi_lora.blocks import Blocks
from tlora.kernels.multi_lora.pages import Way
from tlora.kernels.multi_lora.settings import MEASURED, inside_way

WAYS = ("inside", "forward", "backward")


class InsideGroup(Group):
    """Weights lie as the model would have them then; frozen linears and other ways have theirs as
    usual."""

    def __init__(self, case: Case, features: tuple, *, shadow: bool = False):
        super().__init__(case, features, shadow=shadow)
        self.turned = [weight.T.contiguous().T for weight in self.weights]
        self.pages = {way: self._lists(way) for way in ("forward", "backward")}

    def _lists(self, way: Way) -> Blocks:
        blocks = Blocks.new(replace(self.blocks.layout, inside=way), DEVICE)
        blocks.copy(self.segments)
        return blocks

    def way(self, how: str) -> Way | None:
        if how == "inside":
            how = inside_way(self.num_in, self.outs, MEASURED) or "write"
        if how == "forward":
            return "forward"
        # A mask acts on dS A before the sum.
        fits = how == "backward" and not self.case.dropout
        return "backward" if fits else None

    def laid(self, how: str) -> list[torch.Tensor]:
        return self.turned if self.way(how) == "forward" else self.weights

    def forward(self, how: str, weights: list[torch.Tensor] | None = None) -> None:
        if how not in WAYS:
            super().forward(how, weights)
        elif self.way(how) != "forward":
            super().forward("write", self.laid(how))
        else:
            self.s = triton_product.linears_with_update(
                self.y, self.x, self.turned, self.a_used, self.b_used, self.pages["forward"],
                self.rows, self.linears,
            )  # fmt: skip

    def backward(self, how: str, weights: list[torch.Tensor] | None = None) -> None:
        if how not in WAYS:
            super().backward(how, weights)
        elif self.way(how) != "backward":
            super().backward("write", self.laid(how))
        else:
            blocks = self.pages["backward"]
            ds = backward.add_backward(
                None, self.x, self.dy, self.s, self.a_used, self.b_used, self.grad_a, self.grad_b,
                blocks, self.rows, self.linears,
            )  # fmt: skip
            triton_product.input_gradient_with_update(
                self.dx, self.dy, self.weights, ds, self.a_used, blocks
            )
