"""A product Y = X W that can take the adapters' share in the same loop, in Triton and in Gluon, for
Hopper: the kernels of `gpu_product.py`.

X [tokens, depth] has S in columns behind: slots of 64, `SLOTS` for each linear (backward: for each
slot all linears). W, [width, depth] forward and [depth, width] backward, has pages of 64 rank
columns behind: B^T of a job forward, A of its `run` linears backward. A tile of Y takes the steps
of `depth`, then those of its tokens' jobs: the table has a row for each block of as many tokens as
a tile has, with the number of jobs and the step at which each one's pages begin. Where stacked
linears end (`edge_1`, `edge_2`, in tiles) says which slots of X are a tile's own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

STEP = 64
"""Columns of X and W that one step of the loop takes, and rank columns of a page."""
SLOTS = 2
"""Jobs that a block of tokens may have."""
SIZES = ["num_m", "num_n", "num_k", "group", "edge_1", "edge_2", "run"]


class Setting(NamedTuple):
    kind: str
    """Triton's `loops`, or made one (`flat`); `gluon`."""
    rows: int
    columns: int
    stages: int
    parts: int
    """In which a tile is stored."""
    programs: int = 1
    """On a multiprocessor."""
    tokens: int = 2048
    """Of the tiles that are computed side by side: with as many columns of W^T they make a wave."""

    def __str__(self) -> str:
        words = [self.kind, f"{self.rows}x{self.columns}", f"s{self.stages}", f"e{self.parts}"]
        if self.programs > 1:
            words.append(f"p{self.programs}")
        if self.tokens != 2048:
            words.append(f"t{self.tokens}")
        return " ".join(words)


WIDE = [(rows, 384 - rows, *rest) for rows in (128, 256) for rest in ((3, 1), (3, 2), (4, 2))]
SMALL = [(128, 128, 3, 2, 2), (128, 128, 4, 1)]
SETTINGS = [
    *(Setting(kind, *rest) for kind in ("loops", "flat") for rest in (*WIDE, *SMALL)),
    *(Setting("gluon", *rest) for rest in WIDE),
    *(Setting("gluon", 128, 256, 4, 2, tokens=tokens) for tokens in (1024, 4096)),
    *(Setting("gluon", 256, 128, 4, 2, tokens=tokens) for tokens in (1024, 4096)),
]
"""What compiles for sm_90 without spills in 227 KB. `warp_specialize` does not: Triton 3.6 and 3.7
refuse it with four warps and ignore it with eight."""


@triton.jit(do_not_specialize=[*SIZES, "most"])
def product_kernel(
    x_desc, w_desc, y_desc, p_table, num_m, num_n, num_k, group, edge_1, edge_2, run, most,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, SLOTS: tl.constexpr,
    SPLIT: tl.constexpr, FLAT: tl.constexpr, BACKWARD: tl.constexpr, FUSED: tl.constexpr,
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
                i_x = i_k + tl.where(i_more < 0, 0, shift)
                i_w = tl.where(i_more < 0, i_k, i_page)
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


@gluon.jit
def fetch(
    x_desc, w_desc, x_tiles, w_tiles, ready, free,
    p_table, num_m, num_n, num_k, group, edge_1, edge_2, run,
    ROWS: gl.constexpr, BN: gl.constexpr, STEP: gl.constexpr, SLOTS: gl.constexpr,
    STAGES: gl.constexpr, BACKWARD: gl.constexpr, FUSED: gl.constexpr,
):  # fmt: skip
    """One warp that keeps the stages full."""
    i_stage = 0
    phase = 1
    for i_tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        i_inside = i_tile % (group * num_n)
        i_m = i_tile // (group * num_n) * group + i_inside % group
        i_n = i_inside // group
        for i_k in range(num_k):
            mbarrier.wait(free.index(i_stage), phase)
            fetch_step(
                x_desc, w_desc, x_tiles, w_tiles, ready.index(i_stage), i_stage,
                i_m, i_n, i_k, i_k, ROWS, BN, STEP, BACKWARD,
            )  # fmt: skip
            i_stage = (i_stage + 1) % STAGES
            phase = phase ^ (i_stage == 0).to(gl.int32)
        if FUSED:
            shift = num_k + ((i_n >= edge_1).to(gl.int32) + (i_n >= edge_2).to(gl.int32)) * SLOTS
            for i_job in range(gl.load(p_table + i_m * (1 + SLOTS))):
                page = gl.load(p_table + i_m * (1 + SLOTS) + 1 + i_job)
                for i_more in range(run):
                    mbarrier.wait(free.index(i_stage), phase)
                    fetch_step(
                        x_desc, w_desc, x_tiles, w_tiles, ready.index(i_stage), i_stage,
                        i_m, i_n, shift + i_job * run + i_more, page + i_more,
                        ROWS, BN, STEP, BACKWARD,
                    )  # fmt: skip
                    i_stage = (i_stage + 1) % STAGES
                    phase = phase ^ (i_stage == 0).to(gl.int32)


@gluon.jit
def fetch_step(
    x_desc, w_desc, x_tiles, w_tiles, ready, i_stage, i_m, i_n, i_x, i_w,
    ROWS: gl.constexpr, BN: gl.constexpr, STEP: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(ready, 2 * STEP * (2 * ROWS + BN))
    row = i_m * 2 * ROWS
    tma.async_copy_global_to_shared(x_desc, [row, i_x * STEP], ready, x_tiles.index(2 * i_stage))
    tma.async_copy_global_to_shared(
        x_desc, [row + ROWS, i_x * STEP], ready, x_tiles.index(2 * i_stage + 1)
    )
    if BACKWARD:
        tma.async_copy_global_to_shared(
            w_desc, [i_w * STEP, i_n * BN], ready, w_tiles.index(i_stage)
        )
    else:
        tma.async_copy_global_to_shared(
            w_desc, [i_n * BN, i_w * STEP], ready, w_tiles.index(i_stage)
        )


@gluon.jit
def multiply(
    y_desc, y_tile, x_tiles, w_tiles, ready, free,
    p_table, num_m, num_n, num_k, group, run,
    WHO: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr, SLOTS: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, BACKWARD: gl.constexpr, FUSED: gl.constexpr,
):  # fmt: skip
    """Four warps that multiply and store the upper (WHO 0) or lower rows of every tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    i_stage = 0
    phase = 0
    for i_tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        i_inside = i_tile % (group * num_n)
        i_m = i_tile // (group * num_n) * group + i_inside % group
        i_n = i_inside // group
        num_steps = num_k
        if FUSED:
            num_steps += gl.load(p_table + i_m * (1 + SLOTS)) * run
        b_y = gl.zeros([ROWS, BN], gl.float32, layout)
        i_last = i_stage
        for i_k in range(num_steps):
            mbarrier.wait(ready.index(i_stage), phase)
            b_x = x_tiles.index(2 * i_stage + WHO)
            b_w = w_tiles.index(i_stage)
            if not BACKWARD:
                b_w = b_w.permute([1, 0])
            b_y = warpgroup_mma(b_x, b_w, b_y, is_async=True)
            b_y = warpgroup_mma_wait(num_outstanding=1, deps=(b_y,))
            mbarrier.arrive(free.index(i_last), pred=i_k > 0)
            i_last = i_stage
            i_stage = (i_stage + 1) % STAGES
            phase = phase ^ (i_stage == 0).to(gl.int32)
        b_y = warpgroup_mma_wait(num_outstanding=0, deps=(b_y,))
        mbarrier.arrive(free.index(i_last))
        row = (i_m * 2 + WHO) * ROWS
        if SPLIT == 1:
            store(y_desc, y_tile, row, i_n * BN, b_y)
        else:
            b_left, b_right = b_y.reshape([ROWS, 2, BN // 2]).permute([0, 2, 1]).split()
            store(y_desc, y_tile, row, i_n * BN, b_left)
            store(y_desc, y_tile, row, i_n * BN + BN // 2, b_right)
    tma.store_wait(pendings=0)


@gluon.jit
def store(y_desc, y_tile, row, column, b_y):
    tma.store_wait(pendings=0)
    y_tile.store(b_y.to(y_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [row, column], y_tile)


@gluon.jit(do_not_specialize=SIZES)
def gluon_kernel(
    x_desc, w_desc, y_desc, p_table, num_m, num_n, num_k, group, edge_1, edge_2, run,
    ROWS: gl.constexpr, BN: gl.constexpr, STEP: gl.constexpr, SLOTS: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, BACKWARD: gl.constexpr, FUSED: gl.constexpr,
):  # fmt: skip
    """One warp fetches, two times four multiply; they meet at barriers of each stage."""
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, ROWS, STEP], x_desc.layout)
    W_TILES: gl.constexpr = [STAGES, STEP, BN] if BACKWARD else [STAGES, BN, STEP]
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, W_TILES, w_desc.layout)
    y_tile_0 = gl.allocate_shared_memory(y_desc.dtype, [ROWS, BN // SPLIT], y_desc.layout)
    y_tile_1 = gl.allocate_shared_memory(y_desc.dtype, [ROWS, BN // SPLIT], y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i_stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(i_stage), count=1)
        mbarrier.init(free.index(i_stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (y_desc, y_tile_0, x_tiles, w_tiles, ready, free,
                        p_table, num_m, num_n, num_k, group, run,
                        0, ROWS, BN, SLOTS, STAGES, SPLIT, BACKWARD, FUSED)),
            (multiply, (y_desc, y_tile_1, x_tiles, w_tiles, ready, free,
                        p_table, num_m, num_n, num_k, group, run,
                        1, ROWS, BN, SLOTS, STAGES, SPLIT, BACKWARD, FUSED)),
            (fetch, (x_desc, w_desc, x_tiles, w_tiles, ready, free,
                     p_table, num_m, num_n, num_k, group, edge_1, edge_2, run,
                     ROWS, BN, STEP, SLOTS, STAGES, BACKWARD, FUSED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


class Sizes(NamedTuple):
    depth: int
    backward: bool
    ends: tuple[int, int]
    """Columns of Y where the first and the second linear end."""
    run: int
    """Pages of a job."""


def step_of(
    setting: Setting,
    sizes: Sizes,
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    table: torch.Tensor | None = None,
    most: int = 0,
) -> Callable:
    """A launch, as a call without arguments; `most` jobs are in a row of the table."""
    kind, rows, columns, stages, parts, programs, tokens = setting
    own_rows = rows // 2 if kind == "gluon" else rows
    w_block = [STEP, columns] if sizes.backward else [columns, STEP]
    blocks = [[own_rows, STEP], w_block, [own_rows, columns // parts]]
    descs = [described(kind, *pair) for pair in zip((x, w, y), blocks, strict=True)]
    num_m, num_n = len(y) // rows, y.shape[1] // columns
    group = min(tokens // rows, num_m)
    edges = [end // columns for end in sizes.ends]
    numbers = [num_m, num_n, sizes.depth // STEP, group, *edges, sizes.run]
    constants = {"BN": columns, "STEP": STEP, "SLOTS": SLOTS, "SPLIT": parts,
                 "BACKWARD": sizes.backward, "FUSED": table is not None}  # fmt: skip
    processors = torch.cuda.get_device_properties(0).multi_processor_count if y.is_cuda else 2
    grid = (min(processors * programs, num_m * num_n),)
    if table is None:
        table = torch.zeros(1, dtype=torch.int32, device=y.device)
    if kind == "gluon":
        return lambda: gluon_kernel[grid](
            *descs, table, *numbers, ROWS=own_rows, STAGES=stages, num_warps=4, **constants
        )
    return lambda: product_kernel[grid](
        *descs, table, *numbers, most, BM=rows, FLAT=kind == "flat", num_stages=stages,
        num_warps=8 if rows * columns > 128 * 128 else 4, **constants,
    )  # fmt: skip


def described(
    kind: str, tensor: torch.Tensor, block: list[int]
) -> TensorDescriptor | GluonDescriptor:
    if kind != "gluon":
        return TensorDescriptor.from_tensor(tensor, block)
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return GluonDescriptor.from_tensor(tensor, block, layout)
