"""Rows quantised to FP8 on the GPU, to the bits of fp8.py. One program per row: it reads the row
for its largest magnitude and again, from the cache, to write it. Up to three matrices lie side by
side in the row.

Letters: N columns of a matrix; BN columns of a tile.
"""

import torch
import triton
import triton.language as tl

from tlora.kernels.quantised.fp8 import FORMAT, room
from tlora.kernels.quantised.fp8 import LARGEST as LARGEST_VALUE
from tlora.kernels.quantised.fp8 import SMALLEST_SCALE as SMALLEST_SCALE_VALUE

LARGEST = tl.constexpr(LARGEST_VALUE)
SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE_VALUE)
MOST_PARTS = 3
TILE = 4096


@triton.jit
def _load(p_x, p_factors, o_n, m_n, FACTORS: tl.constexpr):
    b_x = tl.load(p_x + o_n, mask=m_n, other=0.0).to(tl.float32)  # [BN]
    if FACTORS:
        b_x *= tl.load(p_factors + o_n, mask=m_n, other=0.0)
    return b_x


@triton.jit
def _most(b_most, p_x, p_factors, N: tl.constexpr, BN: tl.constexpr, FACTORS: tl.constexpr):
    """The largest magnitudes seen; a NaN is one."""
    for n in range(0, N, BN):
        o_n = n + tl.arange(0, BN)
        b_x = tl.abs(_load(p_x, p_factors, o_n, o_n < N, FACTORS))
        b_most = tl.maximum(b_most, b_x, propagate_nan=tl.PropagateNan.ALL)
    return b_most


@triton.jit
def _write(p_out, p_x, p_factors, scale, N: tl.constexpr, BN: tl.constexpr, FACTORS: tl.constexpr):
    for n in range(0, N, BN):
        o_n = n + tl.arange(0, BN)
        b_x = tl.div_rn(_load(p_x, p_factors, o_n, o_n < N, FACTORS), scale)
        b_in = tl.where(b_x > LARGEST, LARGEST, tl.where(b_x < -LARGEST, -LARGEST, b_x))
        tl.store(p_out + o_n, b_in.to(p_out.dtype.element_ty), mask=o_n < N)


@triton.jit
def quantise_kernel(
    p_out, p_scales, p_x, p_y, p_z, p_factors,
    N_X: tl.constexpr, N_Y: tl.constexpr, N_Z: tl.constexpr,
    BN: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """scales[row] = the row's largest magnitude / 448, out[row] = row / scales[row]"""
    i_row = tl.program_id(0).to(tl.int64)
    p_x += i_row * N_X
    p_y += i_row * N_Y
    p_z += i_row * N_Z
    p_out += i_row * (N_X + N_Y + N_Z)
    p_of_y, p_of_z = p_factors + N_X, p_factors + N_X + N_Y
    b_most = tl.zeros([BN], dtype=tl.float32)
    b_most = _most(b_most, p_x, p_factors, N_X, BN, FACTORS)
    b_most = _most(b_most, p_y, p_of_y, N_Y, BN, FACTORS)
    b_most = _most(b_most, p_z, p_of_z, N_Z, BN, FACTORS)
    # What is no number must reach every value of the row, and tl.max passes over it.
    is_none = tl.max((b_most != b_most).to(tl.int32), axis=0) > 0
    most = tl.max(b_most, axis=0)
    scale = tl.maximum(tl.div_rn(most, LARGEST), SMALLEST_SCALE)
    scale = tl.where(is_none, float("nan"), scale)
    tl.store(p_scales + i_row, scale)
    _write(p_out, p_x, p_factors, scale, N_X, BN, FACTORS)
    _write(p_out + N_X, p_y, p_of_y, scale, N_Y, BN, FACTORS)
    _write(p_out + N_X + N_Y, p_z, p_of_z, scale, N_Z, BN, FACTORS)


def quantise_rows(
    parts: list[torch.Tensor], factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if len(parts) > MOST_PARTS:
        parts = [torch.cat(parts, 1)]
    parts = [part.detach().contiguous() for part in parts]
    rows, widths = len(parts[0]), [part.shape[1] for part in parts]
    out = parts[0].new_empty(rows, sum(widths), dtype=FORMAT)
    scales = parts[0].new_empty(room(rows), dtype=torch.float32)[:rows]
    missing = MOST_PARTS - len(parts)
    given, widths = [*parts, *parts[:1] * missing], [*widths, *[0] * missing]
    tile = min(TILE, triton.next_power_of_2(max(widths)))
    if rows:
        quantise_kernel[(rows,)](
            out, scales, *given, scales if factors is None else factors, *widths,
            BN=tile, FACTORS=factors is not None, num_warps=8 if tile > 1024 else 4,
        )  # fmt: skip
    return out, scales
