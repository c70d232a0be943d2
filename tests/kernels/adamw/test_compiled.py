"""What the interpreter cannot show: the kernels compile for a GPU, and move 16 bytes at a time."""

import importlib.util
import os
import re

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tlora.kernels.adamw import triton_steps

ALIGNED = [["tt.divisibility", 16]]


def wide_accesses(kernel, arguments: dict[str, str], block: int) -> dict[str, int]:
    """Loads and stores of 16 bytes in the code for Hopper, which needs no device to be made."""
    signature = {**arguments, "BLOCK": "constexpr"}
    names = list(signature)
    assert names == kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index("BLOCK"),): block},
        attrs={(i,): ALIGNED for i, name in enumerate(names) if signature[name].startswith("*")},
    )
    code = triton_compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    found = re.findall(r"(ld|st)\.global\.v4", code.asm["ptx"])
    return {kind: found.count(kind) for kind in ("ld", "st")}


def test_aligned_chunks_are_moved_in_pieces_of_16_bytes():
    """Four tensors read and written by `step`, one read by `squares`; a thread has eight values of
    each at 1,024 a block. A kernel without such chunks has none."""
    step = {"p_table": "*i64", "p_orders": "*fp32", "p_coefficients": "*fp32", "first": "i32"}
    assert wide_accesses(triton_steps.step_kernel, step, 1024) == {"ld": 8, "st": 8}
    squares = {"p_partial": "*fp32", "p_table": "*i64", "p_orders": "*fp32", "first": "i32"}
    assert wide_accesses(triton_steps.squares_kernel, squares, 1024) == {"ld": 2, "st": 0}
    norms = ("p_norms", "p_coefficients", "p_partial")
    norms = {**dict.fromkeys(norms, "*fp32"), "p_spans": "*i32", "p_orders": "*fp32"}
    assert wide_accesses(triton_steps.norms_kernel, norms, 1024) == {"ld": 0, "st": 0}
