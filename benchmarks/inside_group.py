"""The same linears with the adapters' update inside the frozen products: of Y (`forward`), of dX
(`backward`, without dropout), of `both`, of those that the settings choose (`inside`), or of these
and of Y where they choose none (`wide`)."""

from dataclasses import replace

from linear_group import DEVICE, Case, Group

from tlora.kernels.multi_lora import triton_backward as backward
from tlora.kernels.multi_lora import triton_pages, triton_product
from tlora.kernels.multi_lora.blocks import Blocks
from tlora.kernels.multi_lora.pages import Ways
from tlora.kernels.multi_lora.settings import MEASURED, inside_ways

WAYS: dict[str, Ways | None] = {
    "inside": None,
    "wide": None,
    "forward": ("forward",),
    "backward": ("backward",),
    "both": ("forward", "backward"),
}


class InsideGroup(Group):
    def __init__(self, case: Case, features: tuple, *, shadow: bool = False):
        super().__init__(case, features, shadow=shadow)
        self.pages = {ways: self._lists(ways) for ways in {self.ways(how) for how in WAYS} - {()}}

    def _lists(self, ways: Ways) -> Blocks:
        blocks = Blocks.new(replace(self.blocks.layout, inside=ways), DEVICE)
        blocks.copy(self.segments)
        return blocks

    def ways(self, how: str) -> Ways:
        ways = WAYS[how]
        if ways is None:
            ways = inside_ways(self.num_in, self.outs, MEASURED)
            ways = ways or (("forward",) if how == "wide" else ())
        # A mask acts on dS A before the sum.
        return tuple(way for way in ways if way == "forward" or not self.case.dropout)

    def forward(self, how: str) -> None:
        if how not in WAYS:
            super().forward(how)
        elif "forward" not in self.ways(how):
            super().forward("write")
        else:
            self.s = triton_product.linears_with_update(
                self.y, self.x, self.weights, self.a_used, self.b_used,
                self.pages[self.ways(how)], self.rows, self.linears,
            )  # fmt: skip

    def backward(self, how: str) -> None:
        if how not in WAYS:
            super().backward(how)
        elif "backward" not in self.ways(how):
            super().backward("write")
        else:
            blocks, slots = self.pages[self.ways(how)], triton_pages.new_slots(self.s)
            backward.add_backward(
                None, self.x, self.dy, self.s, self.a_used, self.b_used, self.grad_a, self.grad_b,
                blocks, self.rows, self.linears, slots=slots,
            )  # fmt: skip
            triton_product.input_gradient_with_update(
                self.dx, self.dy, self.weights, slots, self.a_used, blocks
            )
