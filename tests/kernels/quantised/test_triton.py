"""The kernels of quantised weights give the bits of the definitions: on a GPU, or on the CPU in
Triton's interpreter."""

import importlib.util

import pytest
import torch
from support.interpreter import DEVICE, KERNELS_RUN, ON_GPU, SEED, runs_kernels

from tlora.kernels.quantised import fp8, nf4

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

if KERNELS_RUN:
    from tlora.kernels.quantised import triton_fp8, triton_nf4

# The interpreter cuts bfloat16 off instead of rounding it.
HALVES = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED + seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


@pytest.fixture(autouse=True)
def rounded_as_by_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter (of triton 3.6 and 3.7) rounds to FP8 wrongly: ties away from zero, tiny
    values down, and what is rounded up to a power of two to half of it. Torch rounds here."""
    if ON_GPU or not KERNELS_RUN:
        return
    from triton.language import float8e4nv
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data, given, wanted, mode):
        if wanted != float8e4nv:
            return convert(data, given, wanted, mode)
        return torch.from_numpy(data).to(fp8.FORMAT).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def same_bits(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(torch.equal(*(each.view(torch.uint8) for each in pair)) for pair in pairs)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("widths", [(1,), (64,), (5008,), (48, 16), (272, 48, 4112), (16,) * 4])
@pytest.mark.parametrize("factors", [False, True])
def test_rows_in_fp8_have_the_definitions_bits(dtype, widths, factors, new_tensors_hold_nan):
    """Of one tile and of more, side by side, with rows of nothing, tiny ones and huge ones; the
    last is smaller than any scale."""
    parts = [values(6, width, seed=i, dtype=dtype) for i, width in enumerate(widths)]
    parts[0][1] = 0.0
    for part in parts:
        part[2] *= 1e-4
        part[3] *= 1e4
        part[4] = 0.0
        part[5] *= 1e-44
    of_columns = values(sum(widths), seed=9).abs() if factors else None
    found = triton_fp8.quantise_rows(parts, of_columns)
    assert same_bits(found, fp8.quantise_rows_plainly(parts, of_columns))
    assert fp8.in_room(found[1]) is found[1], "a product would copy them"
    twin = [part.roll(1, 0) for part in parts]
    assert not same_bits(found, fp8.quantise_rows_plainly(twin, of_columns))


@runs_kernels
@pytest.mark.parametrize("column", [0, 40, 4100])
def test_a_row_that_is_no_number_stays_alone(column):
    """All its values become NaN, wherever the NaN was; its neighbours keep their bits."""
    x = values(3, 4112)
    clean, clean_scales = triton_fp8.quantise_rows([x])
    x[1, column] = float("nan")
    found, scales = triton_fp8.quantise_rows([x])
    assert found[1].float().isnan().all()
    assert scales[1].isnan()
    others = (clean[::2].contiguous(), clean_scales[::2].contiguous())
    assert same_bits((found[::2].contiguous(), scales[::2].contiguous()), others)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("shape", [(1, 1), (3, 21), (2, 64), (33, 64), (65, 100), (128, 48)])
def test_unpacked_nf4_has_the_definitions_bits(dtype, shape, new_tensors_hold_nan):
    """A part of a block, one block, a program's, one more than a program's, blocks across rows."""
    packed, scales = nf4.quantise(values(*shape))
    scales[0] = 0.0
    wanted = nf4.dense(packed, scales, shape, dtype)
    found = triton_nf4.dense(packed, scales, shape, dtype)
    assert found.shape == shape
    assert torch.equal(found, wanted)
    if len(scales) > 1:
        assert wanted.count_nonzero() > 0
