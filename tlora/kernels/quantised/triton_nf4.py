"""NF4 weights unpacked on the GPU: half a byte and a sixteenth are read for each value, two are
written. A program has a run of blocks; the sixteen levels come from the L1."""

import functools

import torch
import triton
import triton.language as tl

from tlora.kernels.quantised import nf4

BLOCK = tl.constexpr(nf4.BLOCK)
BLOCKS = 32
"""Of a program: 2,048 values."""


@triton.jit
def unpack_kernel(p_out, p_packed, p_scales, p_levels, count, blocks, BB: tl.constexpr):
    """out[i] = levels[nibble i] * scales[i // 64]"""
    o_b = tl.program_id(0).to(tl.int64) * BB + tl.arange(0, BB)
    m_b = o_b < blocks
    o_p = o_b[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    b_p = tl.load(p_packed + o_p, mask=m_b[:, None], other=0).to(tl.int32)  # [BB, 32]
    b_scale = tl.load(p_scales + o_b, mask=m_b, other=0.0)[:, None]  # [BB, 1]
    b_first = tl.load(p_levels + (b_p >> 4)) * b_scale
    b_second = tl.load(p_levels + (b_p & 15)) * b_scale
    b_x = tl.interleave(b_first, b_second)  # [BB, 64]
    o_x = o_b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(p_out + o_x, b_x.to(p_out.dtype.element_ty), mask=o_x < count)


def dense(
    packed: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    out = packed.new_empty(shape, dtype=dtype)
    blocks = len(scales)
    unpack_kernel[(triton.cdiv(blocks, BLOCKS),)](
        out, packed, scales, _levels(packed.device), out.numel(), blocks, BB=BLOCKS, num_warps=4
    )
    return out


@functools.cache
def _levels(device: torch.device) -> torch.Tensor:
    return torch.tensor(nf4.LEVELS, device=device)
