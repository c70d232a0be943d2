"""The same linears with the adapters' update inside products of our own, where that may pay."""

import torch
from linear_group import DEVICE, Case, Group
from product_kernels import Setting, Update, place, step_of
from product_tables import PAGE, SLOTS, build

from tlora.kernels.multi_lora import triton_backward as backward
from tlora.kernels.multi_lora import triton_forward as forward

WIDE, NARROW = Setting("flat", 256, 3, 1), Setting("flat", 128, 3, 2, 2)
SETTINGS: dict[str, tuple[Setting | None, Setting | None]] = {
    "qkv": (None, None),
    "o": (WIDE, NARROW),
    "gate_up": (WIDE, None),
    "down": (None, WIDE),
}
"""Forward and backward of a group; None: adapters first, and cuBLAS on top. What gained most by
itself (`h200_product.jsonl`). Backward of several linears would have to add to dX."""


class InsideGroup(Group):
    """B lies turned beside B; S is placed by a kernel of its own."""

    def __init__(
        self,
        case: Case,
        features: tuple,
        *,
        shadow: bool = False,
        settings: tuple[Setting | None, Setting | None],
    ):
        super().__init__(case, features, shadow=shadow)
        n = len(self.outs)
        self.slots = self.x.new_empty(case.tokens, n * SLOTS * PAGE)
        self.tables = {
            side: build(self.segments, case.tokens, side).to(DEVICE) for side in ("a", "b")
        }
        on_y, on_dx = settings
        assert on_dx is None or n == 1, "backward of several linears is not inside"
        if case.dropout:
            on_dx = None  # A mask acts on dS A before the sum.
        self.y_steps = self.dx_step = None
        if on_y:
            turned = [b.T.contiguous().to(self.x.dtype) for b in self.b_used]
            updates = [Update(self.slots, b, self.tables["b"], i) for i, b in enumerate(turned)]
            self.y_steps = [
                step_of(on_y, self.x, w, y, backward=False, update=update)
                for w, y, update in zip(self.weights, self.y, updates, strict=True)
            ]
        if on_dx:
            update = Update(self.slots, self.a_used.to(self.x.dtype), self.tables["a"])
            dy, w = self.dy[0], self.weights[0]
            self.dx_step = step_of(on_dx, dy, w, self.dx, backward=True, update=update)

    def forward(self, how: str) -> None:
        if how != "inside" or self.y_steps is None:
            super().forward("write" if how == "inside" else how)
            return
        n = len(self.outs)
        self.s = torch.empty_like(self.s)
        forward.shrink(
            self.s, [self.x] * n, [self.a_used] * n, self.blocks, self.rows, self.linears,
            name="shrink_x",
        )  # fmt: skip
        place(self.slots, self.s, self.tables["b"])
        for step in self.y_steps:
            step()

    def backward(self, how: str) -> None:
        if how != "inside" or self.dx_step is None:
            super().backward("write" if how == "inside" else how)
            return
        ds = torch.empty_like(self.s)
        common = (self.blocks, self.rows, self.linears)
        backward.reduce_fused(ds, self.grad_b, self.s, self.dy, self.b_used, *common)
        backward.reduce([self.grad_a], ds, [self.x], *common, name="reduce_a")
        place(self.slots, ds, self.tables["a"])
        self.dx_step()
