"""The steps of all jobs that are due, in three launches: sums of squares, norms, AdamW.

A program takes one chunk of one job (work.py) and reads how that job steps (orders.py). Norms,
clipping and the check for numbers stay on the device: a job whose norm is none keeps its weights
and moments, and the host learns of it when it reads the norms. Gradients are cleared where they are
read last, and copies in half precision are written where weights are. Sums have a fixed order and
no atomics.

What lies in a copy is always a finite number, so that others may multiply it by zero and get zero:
a weight that is none, or none in the copy's format, is 0 there, and its job's norm becomes NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tlora.kernels.adamw import orders as order_columns
from tlora.kernels.adamw import work as work_columns
from tlora.kernels.adamw.orders import Order, order_table
from tlora.kernels.adamw.work import Work

COLUMNS = tl.constexpr(work_columns.COLUMNS)
VALUE = tl.constexpr(work_columns.VALUE)
GRAD = tl.constexpr(work_columns.GRAD)
EXP_AVG = tl.constexpr(work_columns.EXP_AVG)
EXP_AVG_SQ = tl.constexpr(work_columns.EXP_AVG_SQ)
COUNT = tl.constexpr(work_columns.COUNT)
SLOT = tl.constexpr(work_columns.SLOT)
ALIGNED = tl.constexpr(work_columns.ALIGNED)
COPY = tl.constexpr(work_columns.COPY)
COPY_BYTES = tl.constexpr(work_columns.COPY_BYTES)
VECTOR = tl.constexpr(work_columns.VECTOR)

ORDER = tl.constexpr(order_columns.COLUMNS)
PLACE = tl.constexpr(order_columns.PLACE)
DECAY = tl.constexpr(order_columns.DECAY)
BETA1 = tl.constexpr(order_columns.BETA1)
WEIGHT1 = tl.constexpr(order_columns.WEIGHT1)
BETA2 = tl.constexpr(order_columns.BETA2)
WEIGHT2 = tl.constexpr(order_columns.WEIGHT2)
EPSILON = tl.constexpr(order_columns.EPSILON)
STEP_SIZE = tl.constexpr(order_columns.STEP_SIZE)
CORRECTION = tl.constexpr(order_columns.CORRECTION)
MAX_NORM = tl.constexpr(order_columns.MAX_NORM)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Parameters that a program holds at a time, and its warps."""

    block: int
    warps: int


SQUARES = Tuning(block=2048, warps=4)
STEP = Tuning(block=1024, warps=4)
SUM_BLOCK = 1024
FORMATS = {None: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""Of copies; float32 where there are none at all."""


@triton.jit
def _pointer(p_row, COLUMN: tl.constexpr, ALIGN: tl.constexpr, TYPE: tl.constexpr = tl.float32):
    """The address in this column. ALIGN: in bytes, what the compiler may rely on."""
    address = tl.load(p_row + COLUMN)
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), ALIGN)


@triton.jit
def _count(p_row, MULTIPLE: tl.constexpr):
    return tl.multiple_of(tl.load(p_row + COUNT).to(tl.int32), MULTIPLE)


@triton.jit
def _squares(p_row, BLOCK: tl.constexpr, VALUES: tl.constexpr):
    p_g, count = _pointer(p_row, GRAD, 4 * VALUES), _count(p_row, VALUES)
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(0, count, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_g = tl.load(p_g + o, mask=o < count, other=0.0)  # [BLOCK]
        b_sum += b_g * b_g
    return tl.sum(b_sum)


@triton.jit(do_not_specialize=["first"])
def squares_kernel(p_partial, p_table, p_orders, first, BLOCK: tl.constexpr):
    """partial[chunk] = the sum of the squares of its gradients, for the chunks of due jobs."""
    i = (first + tl.program_id(0)).to(tl.int64)
    p_row = p_table + i * COLUMNS
    if tl.load(p_orders + tl.load(p_row + SLOT) * ORDER + PLACE) < 0:
        return
    if tl.load(p_row + ALIGNED) != 0:
        b_sum = _squares(p_row, BLOCK, VECTOR)
    else:
        b_sum = _squares(p_row, BLOCK, 1)
    tl.store(p_partial + i, b_sum)


@triton.jit
def norms_kernel(p_norms, p_coefficients, p_partial, p_spans, p_orders, BLOCK: tl.constexpr):
    """norms[place] of every due job, and coefficients[slot] for clipping: -1 if its norm is no
    number."""
    slot = tl.program_id(0)
    p_order = p_orders + slot * ORDER
    place = tl.load(p_order + PLACE)
    if place < 0:
        return
    first, size = tl.load(p_spans + 2 * slot), tl.load(p_spans + 2 * slot + 1)
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(0, size, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_sum += tl.load(p_partial + first + o, mask=o < size, other=0.0)  # [BLOCK]
    norm = tl.sqrt_rn(tl.sum(b_sum))
    clip = tl.minimum(tl.div_rn(tl.load(p_order + MAX_NORM), norm + 1e-6), 1.0)
    tl.store(p_norms + place.to(tl.int32), norm)
    tl.store(p_coefficients + slot, tl.where(norm < float("inf"), clip, -1.0))


@triton.jit
def _step(
    p_row,
    p_order,
    p_norm,
    coefficient,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
):
    count = _count(p_row, VALUES)
    p_x = _pointer(p_row, VALUE, 4 * VALUES)
    p_g = _pointer(p_row, GRAD, 4 * VALUES)
    p_m = _pointer(p_row, EXP_AVG, 4 * VALUES)
    p_v = _pointer(p_row, EXP_AVG_SQ, 4 * VALUES)
    decay, epsilon = tl.load(p_order + DECAY), tl.load(p_order + EPSILON)
    beta1, weight1 = tl.load(p_order + BETA1), tl.load(p_order + WEIGHT1)
    beta2, weight2 = tl.load(p_order + BETA2), tl.load(p_order + WEIGHT2)
    step_size, correction = tl.load(p_order + STEP_SIZE), tl.load(p_order + CORRECTION)
    if FORMAT.primitive_bitwidth < 32:
        p_c = _pointer(p_row, COPY, COPY_BYTES * VALUES, FORMAT)
        has_copy = tl.load(p_row + COPY) != 0
    b_lost = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(0, count, BLOCK):
        o = i + tl.arange(0, BLOCK)
        m = o < count
        b_g = tl.load(p_g + o, mask=m, other=0.0) * coefficient  # [BLOCK], like all here
        b_m = tl.load(p_m + o, mask=m, other=0.0)
        b_v = tl.load(p_v + o, mask=m, other=0.0)
        b_x = tl.load(p_x + o, mask=m, other=0.0)
        # torch's lerp: from the nearer end.
        b_d = b_g - b_m
        b_m = tl.where(weight1 < 0.5, b_m + weight1 * b_d, b_g - beta1 * b_d)
        b_v = beta2 * b_v + weight2 * b_g * b_g
        b_root = tl.div_rn(tl.sqrt_rn(b_v), correction) + epsilon
        b_x = b_x * decay - tl.div_rn(step_size * b_m, b_root)
        b_used = b_x
        if FORMAT.primitive_bitwidth < 32:
            b_c = b_x.to(FORMAT)
            b_used = tl.where(has_copy, b_c.to(tl.float32), b_x)
        m_finite = tl.abs(b_used) < float("inf")
        b_lost = tl.where(m & ~m_finite, 1.0, b_lost)
        if FORMAT.primitive_bitwidth < 32:
            tl.store(p_c + o, tl.where(m_finite, b_c, 0.0), mask=m & has_copy)
        tl.store(p_x + o, b_x, mask=m)
        tl.store(p_m + o, b_m, mask=m)
        tl.store(p_v + o, b_v, mask=m)
        tl.store(p_g + o, tl.zeros([BLOCK], dtype=tl.float32), mask=m)
    # Other chunks of the job may write the same.
    if tl.max(b_lost) > 0:
        tl.store(p_norm, float("nan"))


@triton.jit
def _clear(p_row, BLOCK: tl.constexpr):
    p_g, count = _pointer(p_row, GRAD, 4), _count(p_row, 1)
    for i in range(0, count, BLOCK):
        o = i + tl.arange(0, BLOCK)
        tl.store(p_g + o, tl.zeros([BLOCK], dtype=tl.float32), mask=o < count)


@triton.jit(do_not_specialize=["first"])
def step_kernel(
    p_norms,
    p_table,
    p_orders,
    p_coefficients,
    first,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """AdamW on the chunks of due jobs, whose gradients are zero afterwards and whose copies are of
    the new weights, in FORMAT. norms[place] becomes NaN if one of these is not finite there, or,
    where there is no copy, in float32."""
    p_row = p_table + (first + tl.program_id(0)).to(tl.int64) * COLUMNS
    slot = tl.load(p_row + SLOT)
    p_order = p_orders + slot * ORDER
    place = tl.load(p_order + PLACE)
    if place < 0:
        return
    p_norm = p_norms + place.to(tl.int32)
    coefficient = tl.load(p_coefficients + slot)
    if coefficient < 0:
        _clear(p_row, BLOCK)
    elif tl.load(p_row + ALIGNED) != 0:
        _step(p_row, p_order, p_norm, coefficient, FORMAT, BLOCK, VECTOR)
    else:
        # Value by value takes more registers, of which all programs get as many.
        _step(p_row, p_order, p_norm, coefficient, FORMAT, BLOCK // 2, 1)


def step(
    work: Work, orders: Sequence[Order], *, squares: Tuning = SQUARES, tuning: Tuning = STEP
) -> torch.Tensor:
    """Launch these steps: float32 [orders], the norms before clipping, on the device. Nothing waits
    for it here. A job whose norm is no number keeps its weights and moments; one whose new weights
    are no numbers has NaN for its norm. Gradients of all these jobs are zero after."""
    device = work.table.device
    norms = torch.empty(len(orders), device=device)
    if not orders:
        return norms
    table = order_table(orders, work.num_slots)
    if device.type == "cuda":
        # From pinned memory the host need not wait for what is running.
        table = table.pin_memory().to(device, non_blocking=True)
    span = work.around([order.slot for order in orders])
    partial = torch.empty(len(work.table), device=device)
    coefficients = torch.empty(work.num_slots, device=device)
    squares_kernel[(span.size,)](
        partial, work.table, table, span.first, squares.block, num_warps=squares.warps
    )
    norms_kernel[(work.num_slots,)](norms, coefficients, partial, work.span_table, table, SUM_BLOCK)
    step_kernel[(span.size,)](
        norms,
        work.table,
        table,
        coefficients,
        span.first,
        FORMATS[work.copy_dtype],
        tuning.block,
        num_warps=tuning.warps,
    )
    return norms
