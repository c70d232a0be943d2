"""Packed attention on a CPU as one operator, in float32: native.c reads every sequence where it
lies. A compiled layer sees two opaque operators.

It is compiled where it is first needed (c_kernels.py), and kept once it was seen to be right
(native_proof.py).
"""

import ctypes
import functools
from pathlib import Path

import torch

from tlora.kernels import c_kernels
from tlora.kernels.attention import native_proof

SOURCE = Path(__file__).with_name("native.c")
NO_WINDOW = 2**31 - 1
MOST_SIZE = 256
"""Of a head, as in native.c."""


_Pointer, _Number = ctypes.c_void_p, ctypes.c_int64
_NO_MEMORY, _OUTSIDE = 1, 2
"""What may come back, beside 0."""

library = torch.library.Library("tlora", "FRAGMENT")
library.define(
    "native_attention(Tensor q, Tensor k, Tensor v, Tensor starts, float scale, int window) "
    "-> (Tensor, Tensor)"
)
library.define(
    "native_attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor sums, "
    "Tensor starts, float scale, int window) -> (Tensor, Tensor, Tensor)"
)


class _Rows(ctypes.Structure):
    """`rows` of native.c."""

    _fields_ = (("at", _Pointer), ("token", _Number), ("head", _Number))


class _Attention(ctypes.Structure):
    """`attention` of native.c."""

    _fields_ = (
        ("starts", _Pointer),
        ("sequences", _Number),
        ("tokens", _Number),
        ("heads", _Number),
        ("kv_heads", _Number),
        ("size", _Number),
        ("window", _Number),
        ("q", _Rows),
        ("k", _Rows),
        ("v", _Rows),
        ("scale", ctypes.c_double),
        ("threads", _Number),
    )


class Native:
    """The functions of a compiled native.c."""

    def __init__(self, compiled: ctypes.CDLL) -> None:
        self._forward, self._backward = compiled.forward, compiled.backward
        self._forward.argtypes = (_Pointer,) * 3
        self._backward.argtypes = (_Pointer,) * 7
        self.times_used = 0

    def forward(self, q, k, v, starts, scale: float, window: int) -> tuple[torch.Tensor, ...]:
        """The packed rows, and the logarithms of the sums of powers [tokens, heads]."""
        q, k, v = (_with_rows(each) for each in (q, k, v))
        _check_shapes(q, k, v, starts, window)
        y, sums = q.new_empty(q.shape), q.new_empty(q.shape[:2])
        y[int(starts[-1]) :] = 0.0
        given = _given(q, k, v, starts, scale, window)
        self.times_used += 1
        _check(self._forward(ctypes.addressof(given), y.data_ptr(), sums.data_ptr()))
        return y, sums

    def backward(
        self, dy, q, k, v, y, sums, starts, scale: float, window: int
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of queries, keys and values."""
        dy, q, k, v = (_with_rows(each) for each in (dy, q, k, v))
        y, sums = y.contiguous(), sums.contiguous()
        _check_shapes(q, k, v, starts, window)
        found = [each.new_empty(each.shape) for each in (q, k, v)]
        for each in found:
            each[int(starts[-1]) :] = 0.0
        given, upstream = _given(q, k, v, starts, scale, window), _rows(dy)
        to = [each.data_ptr() for each in (y, sums, *found)]
        _check(self._backward(ctypes.addressof(given), ctypes.addressof(upstream), *to))
        return tuple(found)


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    assert x.dtype == torch.float32, x.dtype
    return x if x.stride(2) == 1 else x.contiguous()


def _rows(x: torch.Tensor) -> _Rows:
    return _Rows(x.data_ptr(), x.stride(0), x.stride(1))


def _check_shapes(q, k, v, starts: torch.Tensor, window: int) -> None:
    assert starts.dtype == torch.int32 and starts.is_contiguous(), (starts.dtype, starts.stride())
    (rows, heads, size), (_, kv_heads, _) = q.shape, k.shape
    if k.shape != v.shape or (rows, size) != (k.shape[0], k.shape[2]) or heads % kv_heads:
        shapes = ", ".join(str(tuple(each.shape)) for each in (q, k, v))
        raise ValueError(f"queries, keys and values do not fit each other: {shapes}")
    if not 1 <= window <= NO_WINDOW:
        raise ValueError(f"a window of {window} tokens")


def _given(q, k, v, starts: torch.Tensor, scale: float, window: int) -> _Attention:
    return _Attention(
        starts.data_ptr(),
        len(starts) - 1,
        q.shape[0],
        q.shape[1],
        k.shape[1],
        q.shape[2],
        window,
        _rows(q),
        _rows(k),
        _rows(v),
        scale,
        torch.get_num_threads(),
    )


def _check(outcome: int) -> None:
    if outcome == _NO_MEMORY:
        raise MemoryError("no memory for attention")
    if outcome == _OUTSIDE:
        raise ValueError(
            f"starts that fall or lead outside of the rows, or heads wider than {MOST_SIZE}"
        )


def serves(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> bool:
    """What it computes, where it was compiled."""
    plain = softcap is None and sinks is None
    narrow = query.shape[2] == key.shape[2] == value.shape[2] <= MOST_SIZE
    shared = key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0
    return plain and narrow and shared and all(_is_served(each) for each in (query, key, value))


def is_compiled() -> bool:
    """Compiles it where it was not yet. Not for code that torch compiles."""
    return _native() is not None


def times_used() -> int:
    """How often it has been called in this process: compiled layers call it as others do."""
    found = _native()
    return found.times_used if found else 0


def _is_served(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu"


@functools.cache
def _native() -> Native | None:
    compiled = c_kernels.find("attention", SOURCE, _fault, without="attention is torch's")
    return Native(compiled) if compiled else None


def _fault(compiled: ctypes.CDLL) -> str | None:
    return native_proof.find_fault(Native(compiled))


def _loaded() -> Native:
    found = _native()
    assert found is not None, "asked for without is_compiled()"
    return found


def _forward(q, k, v, starts, scale, window):
    return _loaded().forward(q, k, v, starts, scale, window)


def _backward(dy, q, k, v, y, sums, starts, scale, window):
    return _loaded().backward(dy, q, k, v, y, sums, starts, scale, window)


library.impl("native_attention", _forward, "CPU")
library.impl("native_attention_backward", _backward, "CPU")


@torch.library.register_fake("tlora::native_attention", lib=library)
def _fake_forward(q, k, v, starts, scale, window):
    return q.new_empty(q.shape), q.new_empty(q.shape[:2])


@torch.library.register_fake("tlora::native_attention_backward", lib=library)
def _fake_backward(dy, q, k, v, y, sums, starts, scale, window):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class NativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, starts, scale, window):
        y, sums = torch.ops.tlora.native_attention(q, k, v, starts, scale, window)
        ctx.save_for_backward(q, k, v, y, sums, starts)
        ctx.scale, ctx.window = scale, window
        return y

    @staticmethod
    def backward(ctx, *gradients):
        dq, dk, dv = torch.ops.tlora.native_attention_backward(
            gradients[0], *ctx.saved_tensors, ctx.scale, ctx.window
        )
        return dq, dk, dv, None, None, None


def native_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """[tokens, heads, head size], as `packed_attention`. `starts`: int32 [sequences + 1], in host
    memory; sequences without a token are none."""
    window = NO_WINDOW if window is None else window
    return NativeAttention.apply(query, key, value, starts, scale, window)
