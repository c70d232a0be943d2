"""The product of `benchmarks/product_kernels.py`, which takes the adapters' share in its loop."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.interpreter import DEVICE, runs_kernels

from tlora.kernels.multi_lora.tables import Segment

pytest.importorskip("triton", reason="Triton is not installed: pip install '.[test]'")
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
kernels = __import__("product_kernels")
tables = __import__("product_tables")

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
# Half precision rounds to 2e-4, bfloat16 to 2e-3; a twin is 3 % / sqrt(2) off.
LIMIT = 4e-3 if DEVICE == "cuda" else 1e-3
TOKENS, DEPTH, WIDTH = 300, 128, 320
RANKS = (5, 64, 16)
LINEARS = 2


def segment(start: int, stop: int, i: int, rank: int) -> Segment:
    """Pages meet rows of a neighbour. B begins at multiples of eight, A anywhere."""
    return Segment(start, stop, 75 * i, (rank, rank - 3), (40 * i, 40 * i + 8), scale=1.0)


CASES = {
    "one job": [segment(0, TOKENS, 0, 64)],
    "two in a block, gaps, one without tokens": [
        segment(5, 60, 0, 5), segment(70, 70, 1, 8), segment(70, 250, 2, 64)
    ],
    "as many as fit": [segment(16 * i, 16 * i + 16, i, RANKS[i % 3]) for i in range(8)],
}  # fmt: skip


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, DTYPE)


class Problem:
    def __init__(self, segments: list[Segment], *, backward: bool, linear: int):
        torch.manual_seed(0)
        self.segments, self.backward, self.linear = segments, backward, linear
        self.x, self.s = randn(TOKENS, DEPTH), randn(TOKENS, 2 * 64)
        shape = (DEPTH, WIDTH) if backward else (WIDTH, DEPTH)
        self.w, self.rows = randn(*shape) * DEPTH**-0.5, randn(75 * 8 + 120, WIDTH) * 64**-0.5
        side = "a" if backward else "b"
        self.tables = tables.build(segments, TOKENS, side).to(DEVICE)

    def run(self, setting) -> torch.Tensor:
        slots = torch.full(
            (TOKENS, LINEARS * tables.SLOTS * tables.PAGE), torch.nan, device=DEVICE, dtype=DTYPE
        )
        kernels.place(slots, self.s, self.tables)
        rows = self.rows if self.backward else self.rows.T.contiguous()
        y = torch.full((TOKENS, WIDTH), torch.nan, device=DEVICE, dtype=DTYPE)
        update = kernels.Update(slots, rows, self.tables, self.linear)
        kernels.step_of(setting, self.x, self.w, y, backward=self.backward, update=update)()
        return y

    def expected(self, scale: float = 1.0) -> torch.Tensor:
        w = self.w.float()
        y = self.x.float() @ (w if self.backward else w.T)
        for each in self.segments:
            rank = each.ranks[self.linear]
            first = each.b_rows[self.linear]
            if self.backward:
                first = each.a_row + sum(each.ranks[: self.linear])
            col = sum(-(-r // 8) * 8 for r in each.ranks[: self.linear])
            here = slice(each.start, each.stop)
            s = self.s[here, col : col + rank].float()
            y[here] += scale * s @ self.rows[first : first + rank].float()
        return y


@runs_kernels
@pytest.mark.parametrize("kind", ["loops", "flat"])
@pytest.mark.parametrize("name", CASES)
def test_a_product_has_the_update_of_each_job(name, kind):
    """Forward and backward, of either linear of two, over slots and outputs of NaN."""
    setting = kernels.Setting(kind, 128, 3, 2)
    for backward, linear in itertools.product((False, True), range(LINEARS)):
        problem = Problem(CASES[name], backward=backward, linear=linear)
        found = problem.run(setting).float()
        right, twin = problem.expected(), problem.expected(1.03)
        assert (found - right).norm() / right.norm() < LIMIT
        assert (found - twin).norm() / twin.norm() > LIMIT


@runs_kernels
def test_a_job_has_the_same_bits_among_others():
    """In another slot, with other pages."""
    setting = kernels.Setting("flat", 128, 3, 1)
    mine = segment(20, 100, 3, 16)
    companies = [[mine], [segment(0, 20, 5, 64), mine, segment(100, 128, 0, 5)]]
    alone, among = (Problem(each, backward=True, linear=1).run(setting) for each in companies)
    assert torch.equal(alone[20:100], among[20:100])
    assert not torch.equal(alone[:20], among[:20])


def test_blocks_and_ranks_that_do_not_fit_are_refused():
    crowd = [segment(10 * i, 10 * i + 10, i, 8) for i in range(9)]
    with pytest.raises(ValueError, match="more than 8 jobs in a block of 128 tokens"):
        tables.build(crowd, TOKENS, "a")
    with pytest.raises(ValueError, match="ranks above 64"):
        tables.build([replace(crowd[0], ranks=(65, 8))], TOKENS, "a")
    with pytest.raises(ValueError, match="begin below 65536, not at 65536"):
        tables.build([replace(crowd[0], b_rows=(0, 65_536))], TOKENS, "b")
    with pytest.raises(ValueError, match="multiples of eight, not at"):
        tables.build([replace(crowd[0], b_rows=(0, 4))], TOKENS, "b")
    empty = replace(crowd[8], start=80, stop=80)
    assert int(tables.build([*crowd[:8], empty], TOKENS, "a").pages[0, 0]) == 8


def test_rows_beyond_16_bits_with_a_sign_are_kept():
    """The fourth number of a row is in the sign bit's place."""
    crowd = [segment(10 * i, 10 * i + 10, i, 8) for i in range(4)]
    crowd[3] = replace(crowd[3], b_rows=(65_000, 40_000))
    pages = tables.build(crowd, TOKENS, "b").pages
    assert (int(pages[0, 2]) >> 48) & 0xFFFF == 65_000
    assert (int(pages[1, 2]) >> 48) & 0xFFFF == 40_000
    assert int(pages[0, 0]) == int(pages[0, 1]) == 4


@runs_kernels
@pytest.mark.parametrize("features", [(128, (256,)), (128, (256, 128))], ids=["one", "two"])
def test_linears_with_the_update_inside_give_what_adapters_first_do(features):
    """Forward and backward, of one linear and of two; frozen linears alone do not."""
    linears = __import__("gpu_linears")
    setting = kernels.Setting("flat", 128, 3, 1)
    case = linears.Case(256, 3, "mixed", 0.0)
    settings = (setting, setting if len(features[1]) == 1 else None)
    group = linears.InsideGroup(case, features, shadow=True, settings=settings)
    linears.check_inside("linears", group)
    before = group.grad_a.clone()
    group.forward("inside")
    group.backward("inside")
    assert not before.any()
    assert group.grad_a.any(), "gradients are added to as ever"
    group.segments[0] = replace(group.segments[0], b_rows=(8,) * len(features[1]))
    group.tables["b"].pages.copy_(tables.build(group.segments, 256, "b").pages)
    with pytest.raises(AssertionError, match="inside: errors"):
        linears.check_inside("linears", group)


@runs_kernels
def test_an_output_that_is_not_written_is_seen():
    """Though another one, which is right, comes before it."""
    linears = __import__("gpu_linears")
    setting = kernels.Setting("loops", 128, 3, 1)
    case = linears.Case(256, 3, "mixed", 0.0)
    group = linears.InsideGroup(case, (128, (256,)), shadow=True, settings=(setting, setting))
    group.dx_step = lambda: None
    with pytest.raises(AssertionError, match="inside: errors"):
        linears.check_inside("linears", group)


@runs_kernels
@pytest.mark.parametrize("setting", [("loops", 256, 3, 1), ("flat", 128, 3, 2, 2)], ids=str)
def test_every_tile_is_written_where_the_last_wave_is_not_full(setting):
    """Eighteen blocks of tokens, in waves of sixteen; two tiles of columns or more."""
    tokens, depth, width = 18 * 128, 64, 512
    x, w = randn(tokens, depth), randn(width, depth) * depth**-0.5
    y = torch.full((tokens, width), torch.nan, device=DEVICE, dtype=DTYPE)
    kernels.step_of(kernels.Setting(*setting), x, w, y, backward=False)()
    right = x.float() @ w.float().T
    assert (y.float() - right).norm() / right.norm() < LIMIT
