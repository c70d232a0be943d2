"""`benchmarks/flat_reduce.py`, the gradient of B as one loop, has the bits of the usual kernel."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.interpreter import DEVICE, ON_GPU, runs_kernels

pytest.importorskip("triton", reason="Triton is not installed: pip install '.[test]'")

from tlora.kernels.multi_lora import triton_backward
from tlora.kernels.multi_lora.blocks import Blocks, Layout, Tiles
from tlora.kernels.multi_lora.settings import Tuning
from tlora.kernels.multi_lora.tables import Segment

BENCHMARKS = str(Path(__file__).parents[3] / "benchmarks")
TOKENS, IN, TILE = 96, 16, 256
GROUPS = {"q, k, v": (512, 256, 256), "gate, up": (512, 512), "o": (512,)}
RANKS = (64, 33, 16, 5, 20)
LENGTHS = (40, 7, 0, 30, 16)


def segments_of(linears: int) -> list[Segment]:
    """Ranks of every tile, an empty segment, a gap at the end, one job whose gradient is zero; with
    chunks of 16 tokens most have their sums in several parts."""
    found, start, row = [], 0, 3
    for i, (rank, length) in enumerate(zip(RANKS, LENGTHS, strict=True)):
        rows = (row,) * linears
        found.append(
            Segment(start, start + length, 0, (rank,) * linears, rows, 2.0, zero_grad=i == 3)
        )
        start, row = start + length, row + rank
    return found


@runs_kernels
@pytest.mark.parametrize("stages", [2, 3], ids=["whole tiles", "tiles in eight parts"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("chunk", [16, 64])
def test_one_loop_over_all_items_gives_the_same_bits(group, chunk, stages, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    flat_reduce = __import__("flat_reduce")
    # Each walks several items of a rank tile.
    monkeypatch.setattr(flat_reduce, "num_programs", lambda *_: 3)
    outs = GROUPS[group]
    layout = Layout(
        num_tokens=TOKENS,
        in_features=IN,
        out_features=outs,
        max_segments=6,
        max_rank=64,
        dropout=False,
        tiles=replace(Tiles.for_tokens(TOKENS), chunk_tokens=chunk),
    )
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int, dtype=torch.float16 if ON_GPU else torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    blocks = Blocks.new(layout, DEVICE)
    blocks.copy(segments_of(len(outs)))
    rows = sum(RANKS) + 5
    s, b = random(TOKENS, layout.s_width), [random(rows, out) for out in outs]
    dy = [random(TOKENS, out) for out in outs]
    before = [random(rows, out, dtype=torch.float32) for out in outs]
    tuning = Tuning(tokens=16, features=TILE, stages=stages, programs=1, turned=64)

    def outputs() -> tuple[list[torch.Tensor], torch.Tensor]:
        nan = s.new_full((max(outs) // TILE, *s.shape), torch.nan)
        return [each.clone() for each in before], nan

    (usual, parts), (found, others) = outputs(), outputs()
    no_rows = torch.zeros(TOKENS, dtype=torch.int32, device=DEVICE)
    triton_backward.reduce(
        usual, s, dy, blocks, no_rows, list(range(len(outs))),
        name="reduce_b", tuning=tuning, w=b, part=parts,
    )  # fmt: skip
    table = flat_reduce.flat_table(blocks, TILE)
    flat_reduce.reduce_flat(found, s, dy, blocks, table, tuning, b, others)
    assert all(torch.equal(u, v) for u, v in zip(usual, found, strict=True))
    assert torch.equal(parts.isnan(), others.isnan())
    assert torch.equal(parts.nan_to_num(), others.nan_to_num())
    assert not any(torch.equal(u, v) for u, v in zip(found, before, strict=True))
    assert not others.isnan().all()
    assert not blocks.finished.any(), "counters must be zero again"
