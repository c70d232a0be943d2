"""The kernels of quantised weights, compiled for devices; that needs no GPU."""

import os
import re
from pathlib import Path

import pytest
import torch
from support.compiling import resources, source_of

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install '.[test]'")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def compiled(kernel, arguments: tuple, capability: int, warps: int):
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": warps}
    source = source_of((kernel, arguments, options))
    for i, value in enumerate(arguments):
        # As a launch tells of its numbers.
        if isinstance(value, int) and not kernel.params[i].is_constexpr and value % 16 == 0:
            source.attrs[(i,)] = [["tt.divisibility", 16]]
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options)


def spilled(kernel, folder: Path) -> int:
    """Bytes of local memory."""
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", resources(kernel, folder))))


def meta(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="meta")


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(
    "widths", [(4096, 0, 0), (4096, 1024, 1024), (14336, 14336, 0), (48, 0, 0)]
)
@pytest.mark.parametrize("factors", [False, True])
def test_rows_are_quantised_in_registers(capability, widths, factors, tmp_path):
    """At the shapes of an 8B model and a small one; rounded once, and divided as by torch."""
    from tlora.kernels.quantised.triton_fp8 import TILE, quantise_kernel

    tile = min(TILE, triton.next_power_of_2(max(widths)))
    x = meta(BF16)
    arguments = (meta(FP8), meta(F32), x, x, x, meta(F32), *widths, tile, factors)
    kernel = compiled(quantise_kernel, arguments, capability, 8 if tile > 1024 else 4)
    assert spilled(kernel, tmp_path) == 0
    assert "cvt.rn.satfinite.e4m3x2.f32" in kernel.asm["ptx"]
    assert "div.rn.f32" in kernel.asm["ptx"]
    assert "div.full" not in kernel.asm["ptx"]


def test_ada_rounds_twice():
    """Which is why rows are quantised by torch there (devices.ROUNDS_FROM)."""
    from tlora.kernels.quantised.triton_fp8 import quantise_kernel

    x = meta(BF16)
    arguments = (meta(FP8), meta(F32), x, x, x, meta(F32), 4096, 0, 0, 4096, False)
    assert "cvt.rz.f16.f32" in compiled(quantise_kernel, arguments, 89, 8).asm["ptx"]


@pytest.mark.parametrize("capability", [75, 80, 90, 100])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32])
def test_nf4_is_unpacked_in_registers(capability, dtype, tmp_path):
    from tlora.kernels.quantised.triton_nf4 import BLOCKS, unpack_kernel

    arguments = (meta(dtype), meta(torch.uint8), meta(F32), meta(F32), 1 << 24, 1 << 18, BLOCKS)
    kernel = compiled(unpack_kernel, arguments, capability, 4)
    assert spilled(kernel, tmp_path) == 0
    # Half a byte a value is read in words, and values are written sixteen bytes at a time.
    stores = re.findall(r"st\.global\.(\S+)", kernel.asm["ptx"])
    assert stores
    assert all(store.startswith("v4.b32") for store in stores), stores
