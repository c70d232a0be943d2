"""The path for CPUs where a C compiler is found: native.c does in one call for a group of linears
what cpu.py does with a few products for each segment and linear, in float32 alone.

It is compiled where it is first needed (c_kernels.py), and kept once it was seen to be right
(native_proof.py).
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from tlora.kernels import c_kernels
from tlora.kernels.multi_lora import native_proof
from tlora.kernels.multi_lora.routes import Route

SOURCE = Path(__file__).with_name("native.c")

_Pointer, _Number = ctypes.c_void_p, ctypes.c_int64
_NO_MEMORY, _OUTSIDE = 1, 2
"""What may come back, beside 0."""


class _Group(ctypes.Structure):
    """`group` of native.c."""

    _fields_ = (
        ("table", _Pointer),
        ("scales", _Pointer),
        ("tokens", _Number),
        ("columns", _Number),
        ("linears", _Number),
        ("in", _Number),
        ("outs", _Pointer),
        ("places", _Pointer),
        ("numbers", _Pointer),
        ("x", _Pointer),
        ("a", _Pointer),
        ("b", _Pointer),
        ("s", _Pointer),
        ("s_width", _Number),
        ("threads", _Number),
    )


class Native:
    """The functions of a compiled native.c."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._forward, self._backward = library.forward, library.backward
        self._forward.argtypes = (_Pointer, _Pointer, ctypes.c_int)
        self._backward.argtypes = (_Pointer,) * 6

    def add_forward(
        self,
        y: list[torch.Tensor],
        s: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: list[torch.Tensor],
        route: Route,
        rows: torch.Tensor,
        linears: torch.Tensor,
        *,
        is_written: bool = False,
    ) -> None:
        """y_l += delta_l, and S is written to s unless it is there: a token's in its own row, the
        columns of a linear behind those of the one before."""
        held = _Held(s, x, a, b, route, rows, linears)
        held.check(self._forward(held.group, _addresses(y), is_written))

    def add_backward(
        self,
        dx: torch.Tensor | None,
        x: torch.Tensor,
        dy: list[torch.Tensor],
        s: torch.Tensor,
        a: torch.Tensor,
        b: list[torch.Tensor],
        grad_a: torch.Tensor,
        grad_b: list[torch.Tensor],
        route: Route,
        rows: torch.Tensor,
        linears: torch.Tensor,
    ) -> None:
        """dx += ..., grad_a += ..., grad_b += ...; dx is None where nobody asks for it, s is what
        forward wrote."""
        held = _Held(s, x, a, b, route, rows, linears)
        dy = [dy_l.contiguous() for dy_l in dy]
        ds = torch.empty_like(s)
        to = (_address(dx) if dx is not None else None, _address(grad_a), _addresses(grad_b))
        held.check(self._backward(held.group, _addresses(dy), _address(ds), *to))


class _Held:
    """A group as C sees it, and what must stay where it is meanwhile."""

    def __init__(self, s, x, a, b, route: Route, rows, linears) -> None:
        x, rows, scales = x.contiguous(), rows.contiguous(), route.extra.float()
        outs = (_Number * len(b))(*(b_l.shape[1] for b_l in b))
        b_at = _addresses(b)
        self._held = (x, rows, scales, outs, b_at)
        self._group = _Group(
            _address(route.table, torch.int64),
            _address(scales),
            x.shape[0],
            route.table.shape[1],
            len(b),
            x.shape[1],
            ctypes.addressof(outs),
            _address(rows, torch.int32),
            _address(linears, torch.int64),
            _address(x),
            _address(a),
            ctypes.addressof(b_at),
            _address(s),
            s.shape[1],
            torch.get_num_threads(),
        )

    @property
    def group(self) -> int:
        return ctypes.addressof(self._group)

    def check(self, outcome: int) -> None:
        if outcome == _NO_MEMORY:
            raise MemoryError("no memory for the adapters' products")
        if outcome == _OUTSIDE:
            raise ValueError("a segment is longer than the nano-batch, or wider than its S")


def _address(tensor: torch.Tensor, dtype: torch.dtype = torch.float32) -> int:
    assert tensor.is_contiguous() and tensor.dtype == dtype, (tensor.stride(), tensor.dtype)
    return tensor.data_ptr()


def _addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array:
    return (_Pointer * len(tensors))(*map(_address, tensors))


def serving(x: torch.Tensor, *others: torch.Tensor) -> Native | None:
    """Where it serves such activations, pools and outputs. Under torch.autocast outputs may be of
    another format than what they are made of."""
    is_single = all(each.dtype == torch.float32 for each in (x, *others))
    return _native() if is_single and x.device.type == "cpu" else None


@functools.cache
def _native() -> Native | None:
    without = "adapters go by plain products"
    library = c_kernels.find("adapters", SOURCE, _fault, without=without)
    return Native(library) if library else None


def _fault(library: ctypes.CDLL) -> str | None:
    return native_proof.find_fault(Native(library))
