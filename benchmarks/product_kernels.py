"""A product Y = X W that can take the adapters' share in the same loop, for Hopper: the kernel of
`gpu_product.py`.

X [tokens, depth] has S in columns behind: slots of 64, `SLOTS` for each linear (backward: for each
slot all linears). W, [width, depth] forward and [depth, width] backward, has pages of 64 rank
columns behind: B^T of a job forward, A of its `run` linears backward. A tile of Y takes the steps
of `depth`, then those of its tokens' jobs: the table has a row for each block of as many tokens as
a tile has, with the number of jobs and the step at which each one's pages begin. Where stacked
linears end (`edge_1`, `edge_2`, in tiles) says which slots of X are a tile's own.

S and the pages may also lie in buffers of their own (`apart`), wherever those are, with rows as
long as those of X and W: a tensor descriptor has a stride between X and S as it has one between
rows. So neither X nor W needs room behind its columns, and A of a pool is such pages as it is.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

STEP = 64
"""Columns of X and W that one step of the loop takes, and rank columns of a page."""
SLOTS = 2
"""Jobs that a block of tokens may have."""
WAVE_TOKENS = 2048
"""Of the tiles that are computed side by side: with as many columns of W^T they make a wave."""
SIZES = ["num_m", "num_n", "num_k", "group", "edge_1", "edge_2", "run", "turn_x", "turn_w"]


class Setting(NamedTuple):
    kind: str
    """Triton's `loops`, or made one (`flat`)."""
    rows: int
    columns: int
    stages: int
    parts: int
    """In which a tile is stored."""
    programs: int = 1
    """On a multiprocessor."""

    def __str__(self) -> str:
        words = [self.kind, f"{self.rows}x{self.columns}", f"s{self.stages}", f"e{self.parts}"]
        if self.programs > 1:
            words.append(f"p{self.programs}")
        return " ".join(words)


WIDE = [(rows, 384 - rows, *rest) for rows in (128, 256) for rest in ((3, 1), (3, 2), (4, 2))]
SMALL = [(128, 128, 3, 2, 2), (128, 128, 4, 1)]
SETTINGS = [Setting(kind, *rest) for kind in ("loops", "flat") for rest in (*WIDE, *SMALL)]
"""What compiles for sm_90 without spills in 227 KB. `warp_specialize` does not: Triton 3.6 and 3.7
refuse it with four warps and ignore it with eight."""


@triton.jit(do_not_specialize=[*SIZES, "most"])
def product_kernel(
    x_desc, w_desc, y_desc, p_table, num_m, num_n, num_k, group, edge_1, edge_2, run,
    turn_x, turn_w, most,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, SLOTS: tl.constexpr,
    SPLIT: tl.constexpr, FLAT: tl.constexpr, BACKWARD: tl.constexpr, FUSED: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    for i_tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLAT):
        i_inside = i_tile % (group * num_n)
        i_m = i_tile // (group * num_n) * group + i_inside % group
        i_n = i_inside // group
        num_steps, shift, page_1, page_2 = num_k, 0, 0, 0
        if FUSED:
            # Loops of unlike length are not made one: there every tile takes the most steps.
            jobs = most if FLAT else tl.load(p_table + i_m * (1 + SLOTS))
            num_steps += jobs * run
            page_1 = tl.load(p_table + i_m * (1 + SLOTS) + 1)
            page_2 = tl.load(p_table + i_m * (1 + SLOTS) + 2) - run
            shift = ((i_n >= edge_1).to(tl.int32) + (i_n >= edge_2).to(tl.int32)) * SLOTS
        b_y = tl.zeros((BM, BN), dtype=tl.float32)
        for i_k in range(num_steps):
            i_x, i_w = i_k, i_k
            if FUSED:
                i_more = i_k - num_k
                i_page = i_more + tl.where(i_more < run, page_1, page_2)
                i_x = tl.where(i_more < 0, i_k, (i_more if APART else i_k) + shift)
                i_w = tl.where(i_more < 0, i_k, i_page)
            if APART:
                is_more = (i_k >= num_k).to(tl.int32)
                b_x = x_desc.load([is_more ^ turn_x, i_m * BM, i_x * STEP]).reshape(BM, STEP)
                i_half = is_more ^ turn_w
                if BACKWARD:
                    b_w = w_desc.load([i_half, i_w * STEP, i_n * BN]).reshape(STEP, BN)
                else:
                    b_w = w_desc.load([i_half, i_n * BN, i_w * STEP]).reshape(BN, STEP).T
            else:
                b_x = x_desc.load([i_m * BM, i_x * STEP])  # [BM, STEP]
                if BACKWARD:
                    b_w = w_desc.load([i_w * STEP, i_n * BN])  # [STEP, BN]
                else:
                    b_w = w_desc.load([i_n * BN, i_w * STEP]).T
            b_y = tl.dot(b_x, b_w, b_y)
        if SPLIT == 1:
            y_desc.store([i_m * BM, i_n * BN], b_y.to(y_desc.dtype))
        else:
            b_left, b_right = tl.split(tl.permute(tl.reshape(b_y, (BM, 2, BN // 2)), (0, 2, 1)))
            y_desc.store([i_m * BM, i_n * BN], b_left.to(y_desc.dtype))
            y_desc.store([i_m * BM, i_n * BN + BN // 2], b_right.to(y_desc.dtype))


class Sizes(NamedTuple):
    depth: int
    backward: bool
    ends: tuple[int, int]
    """Columns of Y where the first and the second linear end."""
    run: int
    """Pages of a job."""


class Apart(NamedTuple):
    """What is not behind the columns of X and W, in rows as long as theirs."""

    s: torch.Tensor
    pages: torch.Tensor


def both(one: torch.Tensor, other: torch.Tensor, block: list[int]) -> tuple[TensorDescriptor, int]:
    """A descriptor of the two as one tensor of two halves, and which half is `one`."""
    assert one.stride() == other.stride(), "rows must be of one length"
    first, second = sorted((one, other), key=torch.Tensor.data_ptr)
    apart = (second.data_ptr() - first.data_ptr()) // one.itemsize
    if one.is_cuda:
        assert apart * one.itemsize < 1 << 40, "a descriptor has no such stride"
    rows = max(len(one), len(other))
    shape, strides = [2, rows, one.stride(0)], [apart, *one.stride()]
    return TensorDescriptor(first, shape, strides, [1, *block]), int(first is other)


def step_of(
    setting: Setting,
    sizes: Sizes,
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    table: torch.Tensor | None = None,
    most: int = 0,
    apart: Apart | None = None,
) -> Callable:
    """A launch, as a call without arguments; `most` jobs are in a row of the table."""
    kind, rows, columns, stages, parts, programs = setting
    x_block, w_block = [rows, STEP], [STEP, columns] if sizes.backward else [columns, STEP]
    turns = [0, 0]
    if apart is None:
        descs = [TensorDescriptor.from_tensor(x, x_block), TensorDescriptor.from_tensor(w, w_block)]
    else:
        pairs = [both(x, apart.s, x_block), both(w, apart.pages, w_block)]
        descs, turns = [desc for desc, _ in pairs], [turn for _, turn in pairs]
    descs.append(TensorDescriptor.from_tensor(y, [rows, columns // parts]))
    num_m, num_n = len(y) // rows, y.shape[1] // columns
    group = min(WAVE_TOKENS // rows, num_m)
    edges = [end // columns for end in sizes.ends]
    numbers = [num_m, num_n, sizes.depth // STEP, group, *edges, sizes.run, *turns]
    constants = {"BN": columns, "STEP": STEP, "SLOTS": SLOTS, "SPLIT": parts,
                 "BACKWARD": sizes.backward, "FUSED": table is not None,
                 "APART": apart is not None}  # fmt: skip
    processors = torch.cuda.get_device_properties(0).multi_processor_count if y.is_cuda else 2
    grid = (min(processors * programs, num_m * num_n),)
    if table is None:
        table = torch.zeros(1, dtype=torch.int32, device=y.device)

    def launch(_held: object = (x, w, apart)) -> object:
        """A descriptor holds on to one tensor only."""
        return product_kernel[grid](
            *descs, table, *numbers, most, BM=rows, FLAT=kind == "flat", num_stages=stages,
            num_warps=8 if rows * columns > 128 * 128 else 4, **constants,
        )  # fmt: skip

    return launch
