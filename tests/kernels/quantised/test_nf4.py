"""Four bits a value: the bits of bitsandbytes on a CPU, the nearest level for each value."""

import pytest
import torch

from tlora.kernels.quantised import dense, nf4, quantise, quantised_bytes

RECORDED = bytes.fromhex(
    "49b26754b535ab8b26e68ab466161a33778eb5452cd366986676036bd751b66a"
    "7777777777777777777777777777777777777777777777777777777777777777"
    "a8a36303e15a813d96d2f4b77457b248b278e584444836c853b8b49e9be30237"
)
"""What bitsandbytes 0.50.2 makes of `recorded_values` on a CPU, without double quantisation."""

RECORDED_SCALES = [float.fromhex(text) for text in ("0x1.7bab74p+1", "0x0p+0", "0x1.19f098p-9")]


def values(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def recorded_values() -> torch.Tensor:
    """A usual block, one of zeros, one of tiny values."""
    x = values(3, 64)
    x[1] = 0
    x[2] *= 1e-3
    x[0, 5] = 0
    return x


def test_bits_are_those_of_bitsandbytes():
    packed, scales = nf4.quantise(recorded_values())
    assert bytes(packed.tolist()) == RECORDED
    assert scales.tolist() == RECORDED_SCALES


@pytest.mark.parametrize("shape", [(1, 1), (3, 21), (1, 64), (5, 100), (48, 64)])
def test_every_value_gets_the_level_nearest_to_it(shape):
    """Blocks go across rows; the last may be a part of one. As many bytes as are counted."""
    x = values(*shape)
    kept = quantise(x, "nf4")
    found = dense(*kept, shape, torch.float32).reshape(-1)
    for first in range(0, x.numel(), nf4.BLOCK):
        block, ours = x.reshape(-1)[first:][: nf4.BLOCK], found[first:][: nf4.BLOCK]
        levels = torch.tensor(nf4.LEVELS) * block.abs().max()
        nearest = levels[(block[:, None] - levels).abs().argmin(1)]
        assert torch.equal(ours, nearest)
    assert quantised_bytes(*shape, "nf4") == sum(part.nbytes for part in kept)


def test_large_weights_are_quantised_piece_by_piece(monkeypatch):
    """With the same result."""
    x = values(40, 64)
    whole = nf4.quantise(x)
    monkeypatch.setattr(nf4, "AT_ONCE", 3 * nf4.BLOCK)
    assert all(torch.equal(*pair) for pair in zip(nf4.quantise(x), whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_rounded_once(dtype):
    kept = quantise(values(16, 48).to(dtype), "nf4")
    exact = dense(*kept, (16, 48), torch.float32)
    assert torch.equal(dense(*kept, (16, 48), dtype), exact.to(dtype))
