"""The product with the update inside, compiled for the device that it is for; that needs no GPU."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.compiling import resources

from tlora.kernels.multi_lora import pages
from tlora.kernels.multi_lora.settings import LAY, MEASURED, PRODUCT, TUNINGS, Tuning

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install '.[test]'")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)


def compiled(tuning: Tuning, *, num: int, update: bool, by_feature: bool, apart: bool = False):
    from tlora.kernels.multi_lora.triton_product import product_kernel

    def descriptor(rows: int, columns: int) -> str:
        return f"tensordesc<bf16[{rows}, {columns}]>"

    x = descriptor(pages.BLOCK, pages.PAGE)
    tile = (pages.PAGE, tuning.features)
    y = descriptor(pages.BLOCK, tuning.features)
    w = descriptor(*(reversed(tile) if by_feature else tile))
    types = {
        **dict.fromkeys(("x0_desc", "x1_desc", "x2_desc", "s_desc"), x),
        **{f"{name}{i}_desc": w for name in ("w", "rows") for i in range(3)},
        **{f"y{i}_desc": y for i in range(3)},
        "p_table": "*i32",
    }
    constants = {
        "BM": pages.BLOCK, "BN": tuning.features, "STEP": pages.PAGE, "MOST": 32, "NUM": num,
        "APART": apart, "UPDATE": update, "BY_FEATURE": by_feature,
    }  # fmt: skip
    return compiled_kernel(product_kernel, types, constants, tuning)


def compiled_kernel(kernel, types: dict[str, str], constants: dict[str, object], tuning: Tuning):
    """For Hopper; what is not said to be otherwise is a number. Pointers are of whole tensors."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    numbers = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        {
            name: "constexpr" if name in constants else types.get(name, "i32")
            for name in kernel.arg_names
        },
        {numbers[name]: value for name, value in constants.items()},
        {
            numbers[name]: [["tt.divisibility", 16]]
            for name, kind in types.items()
            if kind.startswith("*")
        },
    )
    options = {"num_warps": tuning.warps, "num_stages": tuning.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize(
    ("num", "apart", "update", "by_feature"),
    [
        (1, False, True, True), (3, True, True, True), (3, False, True, False),
        (1, False, False, True), (1, False, False, False),
    ],
)  # fmt: skip
def test_steps_are_loaded_ahead_whatever_they_read(
    num: int, apart: bool, update: bool, by_feature: bool, tmp_path: Path
):
    """By the copy engine, while the tensor cores have one product on its way; in one loop, in the
    shared memory that there is, and without spills."""
    kernel = compiled(PRODUCT, num=num, update=update, by_feature=by_feature, apart=apart)
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
    usage = resources(kernel, tmp_path)
    assert re.search(r"STACK:0 .* LOCAL:0 ", usage), usage


QKV = {"N0": 4096, "N1": 1024, "N2": 1024, "NUM": 3, "W": 192}


def test_what_products_read_is_laid_in_wide_stores(tmp_path: Path):
    """S in slots, and B turned; a few programs fit each multiprocessor."""
    from tlora.kernels.multi_lora.triton_pages import lay_kernel

    turned = pages.turned_columns(64, 64)
    constants = {
        **QKV, "LIST": 4, "TILES": 32, "WIDTH": 3 * pages.SLOTS * pages.PAGE, "TURNED": turned,
        "BT": LAY.tokens, "BN": LAY.features, "ALIGN": 64,
    }  # fmt: skip
    types = {name: "*bf16" for name in lay_kernel.arg_names if name.startswith("p_")}
    kernel = compiled_kernel(lay_kernel, {**types, "p_table": "*i32"}, constants, LAY)
    usage = resources(kernel, tmp_path)
    assert re.search(r"STACK:0 .* LOCAL:0 ", usage), usage
    registers = int(re.findall(r"REG:(\d+)", usage)[-1])
    assert registers * 128 * LAY.programs <= 65_536
    assert kernel.metadata.shared * LAY.programs <= MEASURED.shared_bytes
    assert not re.search(r"(ld|st)\.global\.b16", kernel.asm["ptx"]), "value by value"


def test_parts_of_ds_are_loaded_side_by_side(tmp_path: Path):
    """Sixteen programs of a multiprocessor, each with several parts on their way."""
    from tlora.kernels.multi_lora.triton_backward import SUM_PARTS
    from tlora.kernels.multi_lora.triton_pages import sum_into_slots_kernel

    tuning = TUNINGS["sum"]
    constants = {
        **QKV, "WIDTH": pages.SLOTS * pages.PAGE, "BT": tuning.tokens, "BN": 256,
        "PARTS": SUM_PARTS,
    }  # fmt: skip
    types = {**dict.fromkeys(("p_s", "p_slots", "p_part"), "*bf16"), "p_table": "*i32"}
    kernel = compiled_kernel(sum_into_slots_kernel, types, constants, replace(tuning, warps=4))
    usage = resources(kernel, tmp_path)
    assert re.search(r"STACK:0 .* LOCAL:0 ", usage), usage
    registers = int(re.findall(r"REG:(\d+)", usage)[-1])
    assert registers * 128 * 8 <= 65_536, registers
    assert not re.search(r"(ld|st)\.global\.b16", kernel.asm["ptx"]), "value by value"
