"""Four bits a value: NF4 of QLoRA. This is the definition; triton_nf4.py unpacks on a GPU.

Values are taken row after row in blocks of 64. A block has its largest magnitude as a scale, and
every value the nearest of sixteen levels, the quantiles of a normal distribution. The bits are
those of bitsandbytes on a CPU, without double quantisation.
"""

import functools

import torch
import torch.nn.functional as F

BLOCK = 64

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

AT_ONCE = 1 << 24
"""Values quantised together: what is in between takes some twenty times their bytes."""


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [32 per block], the earlier value of two in the upper half; float32 [blocks]."""
    values = weight.detach().reshape(-1)
    pieces = [_quantised(piece) for piece in values.split(AT_ONCE)]
    return torch.cat([packed for packed, _ in pieces]), torch.cat([scales for _, scales in pieces])


def _quantised(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = F.pad(values.float(), (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    shares = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
    indices = torch.bucketize(shares, _borders(values.device), out_int32=True).to(torch.uint8)
    return (indices[:, ::2] << 4 | indices[:, 1::2]).view(-1), scales


def dense(
    packed: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The values of a weight of this shape, each rounded once."""
    levels = F.embedding(packed.int(), _pairs(packed.device))
    values = (levels.view(-1, BLOCK) * scales[:, None]).view(-1)[: shape[0] * shape[1]]
    return values.view(shape).to(dtype)


@functools.cache
def _borders(device: torch.device) -> torch.Tensor:
    """Half way between neighbours."""
    levels = torch.tensor(LEVELS)
    return ((levels[1:] + levels[:-1]) / 2).to(device)


@functools.cache
def _pairs(device: torch.device) -> torch.Tensor:
    """[256, 2]: the two levels that a byte stands for."""
    levels = torch.tensor(LEVELS)
    byte = torch.arange(256)
    return torch.stack([levels[byte >> 4], levels[byte & 15]], 1).to(device)
