"""A product Y = X W that takes the adapters' share in the same loop, for Hopper.

    Y = X W^T + S B   forward: W [width, depth], B as [width, rank rows]
    dX = dY W + dS A  backward: W [depth, width], A as [rank rows, width]

After the steps of `depth` a tile of Y takes steps of 64 rank rows (a page), one for each job that
has tokens in its block: only the tensors that a step reads differ, and a tensor descriptor can be
chosen like any number. S lies in slots of 64 columns, one for each job of a block of tokens, zero
in rows and columns that are not this job's (`place`): what else lies in a page meets zeros, and
must be finite. `product_tables.py` says which jobs a block has. Columns of B begin at multiples of
eight.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from product_tables import BLOCK, MOST_ROWS, PAGE, SLOTS, Tables
from triton.tools.tensor_descriptor import TensorDescriptor

WAVE_TOKENS = 2048
"""Of the tiles that are computed side by side: with as many columns of W^T they make a wave."""


class Setting(NamedTuple):
    kind: str
    """Triton's `loops`, or made one (`flat`)."""
    columns: int
    stages: int
    parts: int
    """In which a tile is stored."""
    programs: int = 1
    """On a multiprocessor."""

    def __str__(self) -> str:
        words = [self.kind, f"{BLOCK}x{self.columns}", f"s{self.stages}", f"e{self.parts}"]
        if self.programs > 1:
            words.append(f"p{self.programs}")
        return " ".join(words)


SHAPES = [(256, 3, 1), (256, 3, 2), (256, 4, 2), (128, 3, 2, 2), (128, 4, 1)]
SETTINGS = [Setting(kind, *shape) for kind in ("loops", "flat") for shape in SHAPES]
"""What compiles for sm_90 without spills in 227 KB."""


@triton.jit(do_not_specialize=["num_m", "num_n", "num_k", "group", "first_slot"])
def product_kernel(
    x_desc, s_desc, w_desc, page_desc, y_desc, p_pages, num_m, num_n, num_k, group, first_slot,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr,
    FLAT: tl.constexpr, BACKWARD: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    most = 0
    if FUSED:
        most = tl.load(p_pages).to(tl.int32)
    for i_tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLAT):
        first = i_tile // (group * num_n) * group
        i_inside = i_tile % (group * num_n)
        rows = tl.minimum(group, num_m - first)
        i_m = first + i_inside % rows
        i_n = i_inside // rows
        jobs = 0
        if FUSED:
            p_row = p_pages + 1 + i_m * 3
            # Loops of unlike length are not made one: there every tile takes the most steps.
            jobs = most if FLAT else tl.load(p_row).to(tl.int32)
            four, next_four = tl.load(p_row + 1), tl.load(p_row + 2)
        b_y = tl.zeros((BM, BN), dtype=tl.float32)
        for i_k in range(num_k + jobs):
            x, w, at_x, at_w = x_desc, w_desc, i_k * STEP, i_k * STEP
            if FUSED:
                i_slot = i_k - num_k
                if i_slot >= 0:
                    x, w = s_desc, page_desc
                pages = tl.where(i_slot < 4, four, next_four) >> (i_slot & 3) * 16
                at_x = tl.where(i_slot < 0, at_x, (first_slot + i_slot) * STEP)
                at_w = tl.where(i_slot < 0, at_w, (pages & 0xFFFF).to(tl.int32))
            b_x = x.load([i_m * BM, at_x])  # [BM, STEP]
            if BACKWARD:  # noqa: SIM108 - Triton has no such expression
                b_w = w.load([at_w, i_n * BN])  # [STEP, BN]
            else:
                b_w = w.load([i_n * BN, at_w]).T
            b_y = tl.dot(b_x, b_w, b_y)
        if SPLIT == 1:
            y_desc.store([i_m * BM, i_n * BN], b_y.to(y_desc.dtype))
        else:
            b_left, b_right = tl.split(tl.permute(tl.reshape(b_y, (BM, 2, BN // 2)), (0, 2, 1)))
            y_desc.store([i_m * BM, i_n * BN], b_left.to(y_desc.dtype))
            y_desc.store([i_m * BM, i_n * BN + BN // 2], b_right.to(y_desc.dtype))


@triton.jit(do_not_specialize=["T"])
def place_kernel(
    p_slots, p_s, p_spans, p_pages, T,
    W: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """S of a block's jobs side by side, each linear's jobs together; zeros elsewhere."""
    i_m, i_slot, i_l = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if i_slot < tl.load(p_pages).to(tl.int32):
        p_span = p_spans + ((i_l * tl.num_programs(0) + i_m) * SLOTS + i_slot) * 4
        start, stop = tl.load(p_span), tl.load(p_span + 1)
        col, rank = tl.load(p_span + 2), tl.load(p_span + 3)
        o_t, o_r = i_m * BM + tl.arange(0, BM), tl.arange(0, PAGE)
        m_s = ((o_t >= start) & (o_t < stop))[:, None] & (o_r < rank)[None, :]
        row = o_t.to(tl.int64)[:, None]
        b_s = tl.load(p_s + row * W + col + o_r[None, :], mask=m_s, other=0.0)
        at = (i_l * SLOTS + i_slot) * PAGE + o_r[None, :]
        tl.store(p_slots + row * WIDTH + at, b_s, mask=(o_t < T)[:, None])


def place(slots: torch.Tensor, s: torch.Tensor, tables: Tables) -> None:
    """Fill the slots that products read: [tokens, linears x SLOTS x PAGE]."""
    linears, blocks = tables.spans.shape[:2]
    place_kernel[(blocks, SLOTS, linears)](
        slots, s, tables.spans, tables.pages, len(s), s.shape[1], slots.shape[1],
        BLOCK, PAGE, SLOTS, num_warps=4,
    )  # fmt: skip


class Update(NamedTuple):
    """What the adapters add to a product."""

    slots: torch.Tensor
    rows: torch.Tensor
    """A [rank rows, width], or B turned [width, rank rows]."""
    tables: Tables
    linear: int = 0


def step_of(
    setting: Setting,
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    *,
    backward: bool,
    update: Update | None = None,
) -> Callable[[], object]:
    """A launch, as a call without arguments."""
    kind, columns, stages, parts, programs = setting
    w_block = [PAGE, columns] if backward else [columns, PAGE]
    x_desc = TensorDescriptor.from_tensor(x, [BLOCK, PAGE])
    w_desc = TensorDescriptor.from_tensor(w, w_block)
    s_desc, page_desc, first_slot = x_desc, w_desc, 0
    pages = torch.zeros(1, dtype=torch.int64, device=y.device)
    if update:
        assert len(update.rows if backward else update.rows.T) <= MOST_ROWS, "rows have 16 bits"
        s_desc = TensorDescriptor.from_tensor(update.slots, [BLOCK, PAGE])
        page_desc = TensorDescriptor.from_tensor(update.rows, w_block)
        first_slot, pages = update.linear * SLOTS, update.tables.pages[update.linear]
    y_desc = TensorDescriptor.from_tensor(y, [BLOCK, columns // parts])
    num_m, num_n = triton.cdiv(len(y), BLOCK), triton.cdiv(y.shape[1], columns)
    processors = torch.cuda.get_device_properties(0).multi_processor_count if y.is_cuda else 2
    grid = (min(processors * programs, num_m * num_n),)
    group = min(WAVE_TOKENS // BLOCK, num_m)

    def launch() -> object:
        return product_kernel[grid](
            x_desc, s_desc, w_desc, page_desc, y_desc, pages,
            num_m, num_n, triton.cdiv(x.shape[1], PAGE), group, first_slot,
            BM=BLOCK, BN=columns, STEP=PAGE, SPLIT=parts, FLAT=kind == "flat",
            BACKWARD=backward, FUSED=update is not None,
            num_stages=stages, num_warps=8 if columns > 128 else 4,
        )  # fmt: skip

    return launch
