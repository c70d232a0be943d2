"""Cross-entropy of rows of logits on the GPU, which become their own gradient in place.

One program per row. It reads the row for the maximum and the sum of exponentials, and again,
backward, so that what was read last and may still be in the cache comes first, to write
softmax - onehot over it. Sums are float32; a row's bits depend on nothing but the row. README.md
has the byte counts.

Letters: V vocabulary; tiles: BR groups of BC neighbouring logits, one group per load of 16 bytes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

ALIGNED = 16
"""Triton takes a stride that 16 divides for one, and loads 16 bytes at once."""

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Where a maximum begins: a difference of two infinities would be NaN."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    block: int
    """Most logits per step of a program."""

    warps: int


# Measured on one H200, 4,096 rows of 128,256 bf16 logits: 0.77-0.80 ms; blocks of 4,096 to 16,384
# are within 5 %, 32,768 takes 0.85 (benchmarks/results/h200_loss.jsonl).
SOFTMAX = Tuning(block=8192, warps=32)


@triton.jit
def _tile(start, BR: tl.constexpr, BC: tl.constexpr):
    return start + tl.arange(0, BR)[:, None] * BC + tl.arange(0, BC)[None, :]


@triton.jit
def _load_last(p_row, start, V: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """The tile that reaches beyond the vocabulary, whole groups of it: a mask per logit would make
    its loads as narrow as the vocabulary is odd."""
    o_v = _tile(start, BR, BC)
    m_g = (start + tl.arange(0, BR) * BC < V)[:, None]
    b_x = tl.load(p_row + o_v, mask=m_g, other=0.0).to(tl.float32)  # [BR, BC]
    return o_v, m_g, tl.where(o_v < V, b_x, float("-inf"))


@triton.jit
def _add(b_max, b_sum, b_x):
    """The running maximum and sum of each group, with one more tile [BR, BC]."""
    b_new = tl.maximum(b_max, tl.max(b_x, axis=1))
    b_here = tl.sum(tl.exp(b_x - b_new[:, None]), axis=1)
    return b_new, b_sum * tl.exp(b_max - b_new) + b_here


@triton.jit
def _error(b_x, o_v, target, row_max, share):
    return tl.exp(b_x - row_max) * share - tl.where(o_v == target, 1.0, 0.0)


@triton.jit
def softmax_kernel(
    p_losses, p_logits, p_targets, stride,
    V: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """losses[row] = logsumexp(row) - row[target]; if GRADIENT, row = softmax(row) - onehot."""
    BLOCK: tl.constexpr = BR * BC
    WHOLE: tl.constexpr = V // BLOCK
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + i_row * stride
    target = tl.load(p_targets + i_row)
    # Another row's memory is never read, whatever the target is.
    is_there = (target >= 0) & (target < V)
    chosen = tl.load(p_row + target, mask=is_there, other=float("nan")).to(tl.float32)
    target = target.to(tl.int32)
    b_max = tl.full([BR], LOWEST, dtype=tl.float32)
    b_sum = tl.zeros([BR], dtype=tl.float32)
    for i in range(WHOLE):
        b_x = tl.load(p_row + _tile(i * BLOCK, BR, BC)).to(tl.float32)  # [BR, BC]
        b_max, b_sum = _add(b_max, b_sum, b_x)
    if V % BLOCK != 0:
        _, _, b_x = _load_last(p_row, WHOLE * BLOCK, V, BR, BC)
        b_max, b_sum = _add(b_max, b_sum, b_x)
    row_max = tl.max(b_max, axis=0)
    row_sum = tl.sum(b_sum * tl.exp(b_max - row_max), axis=0)
    tl.store(p_losses + i_row, tl.log(row_sum) - (chosen - row_max))
    if GRADIENT:
        share = 1.0 / row_sum
        if V % BLOCK != 0:
            o_v, m_g, b_x = _load_last(p_row, WHOLE * BLOCK, V, BR, BC)
            b_e = _error(b_x, o_v, target, row_max, share)
            tl.store(p_row + o_v, b_e.to(p_logits.dtype.element_ty), mask=m_g)
        for i in range(WHOLE):
            o_v = _tile((WHOLE - 1 - i) * BLOCK, BR, BC)
            b_x = tl.load(p_row + o_v).to(tl.float32)  # [BR, BC]
            b_e = _error(b_x, o_v, target, row_max, share)
            tl.store(p_row + o_v, b_e.to(p_logits.dtype.element_ty))


def new_logits(rows: int, vocabulary: int, like: torch.Tensor) -> torch.Tensor:
    """[rows, vocabulary], not set. Rows are padded so that each begins with a group; the kernel
    reads and writes the padding of the last one."""
    return like.new_empty(rows, -(-vocabulary // ALIGNED) * ALIGNED)[:, :vocabulary]


def cross_entropy(
    losses: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    gradient: bool,
    tuning: Tuning = SOFTMAX,
) -> None:
    """Writes `losses`, float32 [rows]; with `gradient` also softmax - onehot over `logits`.

    logits   [rows, vocabulary] in bf16, float16 or float32, by `new_logits`
    targets  int64 [rows]
    """
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1 and logits.stride(0) % ALIGNED == 0
    assert targets.is_contiguous() and losses.is_contiguous()
    if rows == 0:
        return
    group = 16 // logits.itemsize
    block = min(tuning.block, triton.next_power_of_2(max(vocabulary, 32 * group)))
    softmax_kernel[(rows,)](
        losses, logits, targets, logits.stride(0),
        V=vocabulary, BR=block // group, BC=group, GRADIENT=gradient,
        num_warps=min(tuning.warps, block // group // 32),
    )  # fmt: skip
