"""The product with the update inside, compiled for the device that it is for; that needs no GPU."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tlora.kernels.multi_lora import pages
from tlora.kernels.multi_lora.settings import MEASURED, PRODUCT, Tuning

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install '.[test]'")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)


def compiled(tuning: Tuning, *, num: int, update: bool):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tlora.kernels.multi_lora.triton_product import product_kernel

    def descriptor(rows: int, columns: int) -> str:
        return f"tensordesc<bf16[{rows}, {columns}]>"

    x, w = descriptor(pages.BLOCK, pages.PAGE), descriptor(pages.PAGE, tuning.features)
    types = {
        **dict.fromkeys(("x0_desc", "x1_desc", "x2_desc", "s_desc"), x),
        **dict.fromkeys(("w0_desc", "w1_desc", "w2_desc", "rows_desc"), w),
        "y_desc": descriptor(pages.BLOCK, tuning.features),
        "p_table": "*i32",
    }
    constants = {
        "BM": pages.BLOCK, "BN": tuning.features, "STEP": pages.PAGE, "MOST": 32, "NUM": num,
        "UPDATE": update,
    }  # fmt: skip
    numbers = {name: (i,) for i, name in enumerate(product_kernel.arg_names)}
    source = ASTSource(
        product_kernel,
        {
            name: "constexpr" if name in constants else types.get(name, "i32")
            for name in product_kernel.arg_names
        },
        {numbers[name]: value for name, value in constants.items()},
        {numbers["p_table"]: [["tt.divisibility", 16]]},
    )
    options = {"num_warps": tuning.warps, "num_stages": tuning.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize(("num", "update"), [(1, True), (3, True), (1, False)])
def test_steps_are_loaded_ahead_whatever_they_read(num: int, update: bool, tmp_path: Path):
    """By the copy engine, while the tensor cores have one product on its way; in one loop, in the
    shared memory that there is, and without spills."""
    kernel = compiled(PRODUCT, num=num, update=update)
    assert kernel.metadata.shared <= MEASURED.shared_bytes
    layouts, ptx = kernel.asm["ttgir"], kernel.asm["ptx"]
    assert layouts.count("scf.for") == 1
    loop = layouts[layouts.index("scf.for") :]
    assert loop.count("async_tma_copy_global_to_local") == 2
    assert loop.count("ttng.warp_group_dot ") == 1 and "pendings = 1" in loop
    # Descriptors are chosen where they lie: a copy of one would be in local memory, where the copy
    # engine cannot read it.
    assert ("selp.b64" in ptx) == update and ".local" not in ptx
    # A tile's sum is cleared in the branch that has waited for it and stored it: choosing between
    # zeros and each of its values would read them while a product is on its way.
    assert 0 < ptx.count("selp") < PRODUCT.tokens * PRODUCT.features // (32 * PRODUCT.warps)
    cubin = tmp_path / "product.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [str(tool), "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"STACK:0 .* LOCAL:0 ", usage), usage
