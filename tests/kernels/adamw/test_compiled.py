"""What the interpreter cannot show: the kernels compile for a GPU, move four values at a time, and
keep all of them in registers."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

import triton
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tlora.kernels.adamw import triton_steps

ALIGNED = [["tt.divisibility", 16]]
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


STEP = {
    "p_norms": "*fp32",
    "p_table": "*i64",
    "p_orders": "*fp32",
    "p_coefficients": "*fp32",
    "first": "i32",
}


def compiled(kernel, arguments: dict[str, str], **constants):
    """For Hopper, which needs no device."""
    signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
    names = list(signature)
    assert names == kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): ALIGNED for i, name in enumerate(names) if signature[name].startswith("*")},
    )
    return triton_compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def wide_accesses(code) -> dict[str, int]:
    """Loads and stores of four values."""
    found = re.findall(r"(ld|st)\.global\.(v4|v2)\.b32", code.asm["ptx"])
    wide = {"ld": ("ld", "v4"), "st": ("st", "v4"), "copy": ("st", "v2")}
    return {name: found.count(kind) for name, kind in wide.items()}


def test_aligned_chunks_are_moved_four_values_at_a_time():
    """Four tensors read and written by `step`, and a copy if there is one; one read by `squares`. A
    thread has eight values of each at 1,024 a block. A kernel without such chunks has none."""
    for dtype, copies in ((None, 0), (torch.float16, 2), (torch.bfloat16, 2)):
        code = compiled(
            triton_steps.step_kernel, STEP, FORMAT=triton_steps.FORMATS[dtype], BLOCK=1024
        )
        assert wide_accesses(code) == {"ld": 8, "st": 8, "copy": copies}
    squares = {"p_partial": "*fp32", "p_table": "*i64", "p_orders": "*fp32", "first": "i32"}
    code = compiled(triton_steps.squares_kernel, squares, BLOCK=1024)
    assert wide_accesses(code) == {"ld": 2, "st": 0, "copy": 0}
    norms = ("p_norms", "p_coefficients", "p_partial")
    norms = {**dict.fromkeys(norms, "*fp32"), "p_spans": "*i32", "p_orders": "*fp32"}
    code = compiled(triton_steps.norms_kernel, norms, BLOCK=1024)
    assert wide_accesses(code) == {"ld": 0, "st": 0, "copy": 0}


@pytest.mark.parametrize("dtype", triton_steps.FORMATS)
def test_a_step_keeps_its_values_in_registers(dtype: torch.dtype | None, tmp_path: Path):
    """As the engine launches it, six programs of 128 threads fit a multiprocessor of Hopper, and
    no more than two values of a thread are spilled (by Triton 3.6; by 3.7 none). Of blocks of four
    times the size only two fit."""
    for block, programs in ((triton_steps.STEP.block, 6), (4 * triton_steps.STEP.block, 2)):
        code = compiled(
            triton_steps.step_kernel, STEP, FORMAT=triton_steps.FORMATS[dtype], BLOCK=block
        )
        path = tmp_path / f"{block}.cubin"
        path.write_bytes(code.asm["cubin"])
        command = [TOOL, "--dump-resource-usage", path]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0]
        assert 65536 // (128 * int(registers)) == programs
        assert block > triton_steps.STEP.block or int(stack) <= 8
