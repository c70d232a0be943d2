"""The kernels fit the shared memory of devices that nobody tuned them on: Triton's own compiler is
asked, which needs no GPU.

Launches are recorded instead of made, so what is compiled is what would run.
"""

import functools
import itertools
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compiling import resources, source_of

from tlora.kernels.multi_lora import settings
from tlora.kernels.multi_lora.blocks import Blocks, Layout, Tiles
from tlora.kernels.multi_lora.settings import Device, Shape, Tuning

pytest.importorskip("triton", reason="Triton is not installed: pip install '.[test]'")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)

DEVICES = {
    "sm_75": Device(shared_bytes=65_536, capability=75),
    "sm_80": Device(shared_bytes=166_912, capability=80),
    "sm_86": Device(shared_bytes=101_376, capability=86),
    "sm_89": Device(shared_bytes=101_376, capability=89),
    "sm_90": settings.MEASURED,
    "sm_100": Device(shared_bytes=232_448, capability=100),
    "sm_120": Device(shared_bytes=101_376, capability=120),
}
"""What CUDA's programming guide gives one block of each."""

KERNELS = ("shrink", "expand_y", "reduce_b", "sum", "reduce_a", "expand_dx")
IN, OUTS, TOKENS = 4096, (4096, 1024, 1024), 2048
HALF, FULL = torch.float16, torch.float32


@functools.cache
def launches(device, rank, dtype, pool, dropout, write=True, outs=OUTS):
    """Every launch of a forward and backward: kernel, arguments, compiler options."""
    from tlora.kernels.multi_lora import triton_backward, triton_forward

    calls = []

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, _):
            return lambda *arguments, **options: calls.append((self.kernel, arguments, options))

    def new(*sizes, dtype=dtype):
        return torch.empty(*sizes, dtype=dtype, device="meta")

    layout = Layout(
        num_tokens=TOKENS,
        in_features=IN,
        out_features=outs,
        max_segments=64,
        max_rank=rank,
        dropout=dropout,
        tiles=Tiles.for_tokens(TOKENS, dropout=dropout),
    )
    rows = new(TOKENS, dtype=torch.int32)
    blocks = Blocks(layout, rows, rows)
    x, y = new(TOKENS, IN), [new(TOKENS, out) for out in outs]
    a, b = new(512, IN, dtype=pool), [new(512, out, dtype=pool) for out in outs]
    grad_a, grad_b = new(512, IN, dtype=FULL), [new(512, out, dtype=FULL) for out in outs]
    with pytest.MonkeyPatch.context() as patch:
        for module, kernels in (
            (triton_forward, ("shrink_kernel", "expand_kernel")),
            (triton_backward, ("reduce_kernel", "sum_kernel")),
        ):
            for kernel in kernels:
                patch.setattr(module, kernel, Recorder(getattr(module, kernel)))
            patch.setattr(module, "tuning_of", lambda k, s, _: settings.tuning(k, s, device))
        common = (blocks, rows, list(range(len(outs))))
        s = triton_forward.add_forward(y, x, a, b, *common, write=write)
        triton_backward.add_backward(x, x, y, s, a, b, grad_a, grad_b, *common, write=write)
    return dict(zip(KERNELS, calls, strict=True))


def compiled_bytes(launch, capability):
    """Shared memory that Triton gives the kernel on such a device."""
    from triton._C.libtriton import ir, nvidia, passes
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    source, options = source_of(launch), launch[2]
    target = GPUTarget("cuda", capability, 32)
    backend: Any = make_backend(target)
    parsed = backend.parse_options(dict(options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    code = backend.get_codegen_implementation(parsed)
    module = source.make_ir(target, parsed, code, backend.get_module_map(), context)
    metadata = {**parsed.__dict__, "target": target}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, source.language)
    for name in ("ttir", "ttgir"):
        module = stages[name](module, metadata)
    # The begin of the next stage, up to where shared memory is given out: the rest takes longer.
    manager = ir.pass_manager(module.context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, 87)
    manager.run(module, "shared_memory")
    return module.get_int_attr("ttg.shared")


def shape_of(rank, dtype, pool, dropout):
    return Shape(
        num_tokens=TOKENS,
        max_rank=rank,
        width=len(OUTS) * rank,
        itemsize=dtype.itemsize,
        pool_itemsize=pool.itemsize,
        dropout=dropout,
    )


def check(device, rank, dtype, pool, dropout, *, write=True):
    for kernel, launch in launches(device, rank, dtype, pool, dropout, write).items():
        own = dropout and kernel in ("shrink", "expand_dx", "reduce_a")
        if dropout and not own:
            continue  # The same as without.
        operand = dtype if kernel == "reduce_a" else pool
        shape = shape_of(rank, dtype, operand, own)
        tuning = settings.tuning(kernel, shape, device)
        estimate = settings.shared_bytes(kernel, shape, tuning, device.capability)
        real = compiled_bytes(launch, device.capability)
        case = f"{kernel}, rank {rank}, {dtype}, pool {pool}, dropout {dropout}: {tuning}"
        assert real <= estimate <= device.shared_bytes, f"{case}: {real}, estimate {estimate}"


@pytest.mark.parametrize("name", ["sm_75", "sm_86"])
def test_usual_adapters_fit_a_small_device(name):
    check(DEVICES[name], 64, HALF, HALF, dropout=False)


def test_the_measured_settings_do_not_fit_a_small_device():
    """What the smaller settings are for; and the estimate sees it."""
    shape = shape_of(64, HALF, HALF, dropout=False)
    for kernel, name in (("expand_dx", "sm_75"), ("reduce_b", "sm_86")):
        device = DEVICES[name]
        tried = launches(replace(device, shared_bytes=1 << 20), 64, HALF, HALF, dropout=False)
        assert compiled_bytes(tried[kernel], device.capability) > device.shared_bytes
        best = settings.tuning(kernel, shape)
        assert settings.shared_bytes(kernel, shape, best, device.capability) > device.shared_bytes


def test_a_tile_of_b_that_comes_with_every_block_has_a_place_in_every_stage():
    tried = launches(settings.MEASURED, 64, HALF, HALF, dropout=False)
    shape = shape_of(64, HALF, HALF, dropout=False)
    line = settings.tuning("reduce_b", shape)
    assert line.reload
    estimate = settings.shared_bytes("reduce_b", shape, line, 90)
    assert compiled_bytes(tried["reduce_b"], 90) == estimate


CASES = list(
    itertools.product(
        DEVICES, (8, 64, 256), (False, True), ((HALF, HALF), (HALF, FULL), (FULL, FULL))
    )
)
EVERY = 1 if os.environ.get("TLORA_ALL_DEVICES") else 17
"""All of them compile for some ten minutes (`make devices`); a part has every device in it, every
rank, both kinds of dropout and all formats."""


def test_the_part_that_is_tried_has_something_of_everything():
    for column in range(4):
        assert {case[column] for case in CASES[::17]} == {case[column] for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rank", "dropout", "dtypes"), CASES[::EVERY], ids=str)
def test_every_adapter_fits_every_device(name, rank, dropout, dtypes):
    check(DEVICES[name], rank, *dtypes, dropout=dropout)


@pytest.mark.slow
def test_adding_to_the_output_takes_no_more():
    check(DEVICES["sm_90"], 64, HALF, HALF, dropout=False, write=False)


@pytest.mark.slow
def test_bfloat16_takes_what_float16_does():
    for launch in KERNELS:
        found = {
            dtype: compiled_bytes(
                launches(DEVICES["sm_86"], 64, dtype, dtype, dropout=False)[launch], 86
            )
            for dtype in (torch.float16, torch.bfloat16)
        }
        assert found[torch.float16] == found[torch.bfloat16], launch


@pytest.mark.slow
def test_the_estimate_follows_the_tiles():
    """No constant that happens to be large: on the device of the table it is close."""
    shape = shape_of(64, HALF, HALF, dropout=False)
    tried = launches(settings.MEASURED, 64, HALF, HALF, dropout=False)
    for kernel in ("shrink", "expand_y", "expand_dx", "reduce_a", "reduce_b"):
        tuning: Tuning = settings.tuning(kernel, shape)
        estimate = settings.shared_bytes(kernel, shape, tuning, 90)
        assert estimate <= 1.1 * compiled_bytes(tried[kernel], 90), kernel


@pytest.mark.parametrize("outs", [OUTS, OUTS[:1]])
def test_masks_of_dx_stay_in_registers(outs: tuple[int, ...], tmp_path: Path):
    """Of q, k and v with dropout, where a program has most to hold, at most four registers are
    spilled; the factor of what is kept is one instruction with the sum."""
    import triton
    from triton.backends.compiler import GPUTarget

    half = torch.bfloat16
    launch = launches(DEVICES["sm_90"], 64, half, half, True, outs=outs)["expand_dx"]
    target = GPUTarget("cuda", 90, 32)
    kernel = triton.compile(source_of(launch), target=target, options=dict(launch[2]))
    usage = resources(kernel, tmp_path)
    stack = re.search(r"STACK:(\d+) .* LOCAL:0 ", usage)
    assert stack and int(stack[1]) <= 16, usage
    assert "fma.rn.f32" in kernel.asm["ptx"]
