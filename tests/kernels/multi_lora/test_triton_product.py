"""Frozen products that take the adapters' update in their own loop."""

import math
from dataclasses import replace

import pytest
import torch
from support.interpreter import DEVICE, KERNELS_RUN, SEED, runs_kernels

from tlora.kernels.multi_lora import pages, settings
from tlora.kernels.multi_lora.blocks import Blocks, Layout
from tlora.kernels.multi_lora.settings import Tuning
from tlora.kernels.multi_lora.tables import Segment, s_columns

if KERNELS_RUN:
    from tlora.kernels.multi_lora import triton_pages, triton_product

pytestmark = pytest.mark.usefixtures("new_tensors_hold_nan")
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
# Half precision rounds to 2e-4, bfloat16 to 2e-3; a twin is 3 % / sqrt(2) off.
LIMIT = 4e-3 if DEVICE == "cuda" else 1e-3
TUNING = Tuning(tokens=128, features=128, warps=4, stages=3, programs=1)
TOKENS, DEPTH, WIDTH = 300, 136, 320
RANKS = (5, 64, 16)
DEPTHS = (DEPTH, 64, 72)
"""Of the products that are summed."""

WIDTHS = (WIDTH, 72, 264)
"""Of those that have an output each: three tiles, one and three of 128 features."""

TILE = 48
"""Features that a part of dS is of: three, two and two parts of these."""

SCALE = 1.25


def segment(start: int, stop: int, i: int, rank: int) -> Segment:
    """Pages meet rows of a neighbour, and begin anywhere."""
    return Segment(start, stop, 75 * i, (rank, max(0, rank - 5)), (41 * i, 43 * i + 7), SCALE)


def in_eights(start: int, stop: int, i: int, ranks: tuple[int, ...]) -> Segment:
    """Rows of all linears follow each other without a gap, and so do their columns."""
    return Segment(start, stop, 75 * i, ranks, (0,) * len(ranks), SCALE)


CASES = {
    "one job": [segment(0, TOKENS, 0, 64)],
    "nobody": [],
    "two in a block, gaps, one without tokens, one with no adapter on a linear": [
        segment(5, 60, 0, 5), segment(70, 70, 1, 8), segment(70, 250, 2, 64)
    ],
    "as many as fit": [segment(8 * i, 8 * i + 8, i, RANKS[i % 3]) for i in range(16)],
    "a rank beyond a page": [segment(0, 140, 0, 150), segment(140, 290, 2, 9)],
}  # fmt: skip


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, DTYPE)


class Problem:
    """Forward, a product of each of two linears, which may differ in width; backward, one product
    of both. Rows of nobody are finite, as in a pool."""

    def __init__(self, segments: list[Segment], way: pages.Way, linears: int = 2):
        torch.manual_seed(SEED)
        self.segments, self.way, self.linears = segments, way, linears
        depths, widths = DEPTHS[:linears], WIDTHS[:linears]
        self.depths, self.widths = depths, widths
        layout = Layout(
            num_tokens=TOKENS,
            in_features=DEPTH if way == "forward" else WIDTH,
            out_features=widths if way == "forward" else depths,
            max_segments=32,
            max_rank=152,
            dropout=False,
            inside=("forward", "backward"),
        )
        self.blocks = Blocks.new(layout, DEVICE)
        self.blocks.copy(segments)
        self.rows = [randn(75 * pages.SLOTS + 300, width) * 64**-0.5 for width in widths]
        if way == "backward":
            self.parts = randn(-(-max(depths) // TILE), TOKENS, layout.s_width) / 2
            self.rows = self.rows[:1] * linears
            self.x = [randn(TOKENS, depth) for depth in depths]
            self.w = [randn(depth, WIDTH) * sum(depths) ** -0.5 for depth in depths]
        else:
            self.s = randn(TOKENS, layout.s_width)
            self.x = [randn(TOKENS, DEPTH)] * linears
            self.w = [randn(width, DEPTH) * DEPTH**-0.5 for width in widths]
        # As kernels leave it: zeros behind a rank, up to a multiple of eight.
        s = self.s[None] if way == "forward" else self.parts
        for each in segments:
            for col, rank in zip(s_columns(each.ranks), each.ranks, strict=True):
                s[:, each.start : each.stop, col + rank : col + -(-rank // 8) * 8] = 0.0

    def run(self, tuning: Tuning = TUNING) -> list[torch.Tensor]:
        """Over outputs of NaN."""
        outputs = [
            torch.full((TOKENS, width), torch.nan, device=DEVICE, dtype=DTYPE)
            for width in (self.widths if self.way == "forward" else (WIDTH,))
        ]
        if self.way == "backward":
            update = triton_product.Update(self.placed()[1], self.rows[:1], self.blocks, "backward")
            triton_product.product(outputs, self.x, self.w, update=update, tuning=tuning)
            return outputs
        slots, turned = triton_pages.lay(self.s, self.rows, self.blocks)
        update = triton_product.Update(slots, turned, self.blocks, "forward")
        triton_product.product(
            outputs, self.x[:1], self.w, by_feature=True, update=update, tuning=tuning
        )
        return outputs

    def placed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """dS, and what lies in the slots of backward's pages."""
        ds = torch.full_like(self.parts[0], torch.nan)
        slots = triton_pages.new_slots(ds)
        triton_pages.sum_into_slots(
            ds, slots, self.parts, list(self.depths), TILE, self.blocks, tokens=8, parts=2
        )
        return ds, slots

    def s_of(self, linear: int, here: slice, columns: slice) -> torch.Tensor:
        if self.way == "forward":
            return self.s[here, columns].float()
        tiles = -(-self.depths[linear] // TILE)
        return SCALE * self.parts[:tiles, here, columns].float().sum(0)

    def expected(self, scale: float = 1.0) -> list[torch.Tensor]:
        outputs = []
        for linear, (x, w, rows) in enumerate(zip(self.x, self.w, self.rows, strict=True)):
            y = x.float() @ (w.float().T if self.way == "forward" else w.float())
            for each in self.segments:
                rank, first = each.ranks[linear], each.b_rows[linear]
                if self.way == "backward":
                    first = each.a_row + sum(each.ranks[:linear])
                col = sum(-(-r // 8) * 8 for r in each.ranks[:linear])
                here = slice(each.start, each.stop)
                s = self.s_of(linear, here, slice(col, col + rank))
                y[here] += scale * s @ rows[first : first + rank].float()
            outputs.append(y)
        return outputs if self.way == "forward" else [sum(outputs)]


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.float() - right).norm() / right.norm())


@runs_kernels
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_a_product_has_the_update_of_each_job(name: str, way: pages.Way):
    problem = Problem(CASES[name], way)
    both = zip(problem.run(), problem.expected(), problem.expected(1.03), strict=True)
    for linear, (found, right, twin) in enumerate(both):
        assert error(found, right) < LIMIT, linear
        assert (error(found, twin) > LIMIT) == bool(CASES[name]), linear


@runs_kernels
@pytest.mark.parametrize("linears", [1, 2, 3])
def test_a_product_sums_over_the_linears_of_a_group(linears: int):
    """Ranks that pages span, and ranks that they do not."""
    for ranks in ((16, 24, 64), (5, 16, 9)):
        segments = [in_eights(0, 150, 1, ranks[:linears]), in_eights(150, 290, 0, ranks[:linears])]
        problem = Problem(segments, "backward", linears)
        (found,), (right,), (twin,) = problem.run(), problem.expected(), problem.expected(1.03)
        assert error(found, right) < LIMIT < error(found, twin), ranks


@runs_kernels
def test_products_of_one_input_have_an_output_each():
    """Of several widths: the first tile of one linear follows the last of another. And of unlike
    numbers of pages, the first linear with the fewest: a program takes the steps of them all."""
    segments = [in_eights(0, 150, 1, (0, 24, 72)), in_eights(150, 290, 0, (8, 0, 40))]
    problem = Problem(segments, "forward", 3)
    both = zip(problem.run(), problem.expected(), problem.expected(1.03), strict=True)
    for linear, (found, right, twin) in enumerate(both):
        assert error(found, right) < LIMIT < error(found, twin), linear


@runs_kernels
def test_a_block_may_have_as_many_jobs_as_there_are_slots():
    crowd = [in_eights(4 * i, 4 * i + 4, i, (8,)) for i in range(pages.SLOTS)]
    problem = Problem(crowd, "backward", 1)
    (found,), (right,) = problem.run(), problem.expected()
    for i in range(pages.SLOTS):
        assert error(found[4 * i : 4 * i + 4], right[4 * i : 4 * i + 4]) < LIMIT, i


@runs_kernels
@pytest.mark.parametrize("programs", [1, 2, 64])
def test_how_many_programs_there_are_changes_no_bit(programs: int, monkeypatch):
    """Fewer than tiles, more than tiles: the last of them have fewer tiles, and unlike steps."""
    problem = Problem(CASES["two in a block, gaps, one without tokens, "
                            "one with no adapter on a linear"], "forward", 2)  # fmt: skip
    usual = problem.run()
    monkeypatch.setattr(triton_product, "_processors", lambda _: programs)
    for one, other in zip(usual, problem.run(), strict=True):
        assert torch.equal(one, other)


@runs_kernels
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_job_has_the_same_bits_among_others(way: pages.Way):
    """In another slot, with other pages, elsewhere in B turned; with a neighbour whose S is no
    number."""
    mine = segment(20, 100, 3, 16)
    alone, among = (
        Problem(each, way)
        for each in ([mine], [segment(0, 20, 5, 64), mine, segment(100, 128, 0, 5)])
    )
    s = among.s[None] if way == "forward" else among.parts
    s[:, :20] = torch.nan
    for one, other in zip(alone.run(), among.run(), strict=True):
        assert torch.equal(one[20:100], other[20:100])
        assert other[:20].isnan().all() and other[128:].isfinite().all()


@runs_kernels
@pytest.mark.parametrize(("features", "by_feature"), [(128, False), (256, True)])
def test_every_tile_is_written_where_the_last_wave_is_not_full(features: int, by_feature: bool):
    """Eighteen blocks of tokens, in waves of sixteen; no update."""
    tokens, depth, width = 18 * 128, 64, 520
    torch.manual_seed(SEED)
    x, w = randn(tokens, depth), randn(depth, width) * depth**-0.5
    y = torch.full((tokens, width), torch.nan, device=DEVICE, dtype=DTYPE)
    laid = w.T.contiguous() if by_feature else w
    tuning = replace(TUNING, features=features)
    triton_product.product([y], [x], [laid], by_feature=by_feature, tuning=tuning)
    assert error(y, x.float() @ w.float()) < LIMIT


@runs_kernels
@pytest.mark.parametrize("ranks", [(16, 24, 64), (5, 16, 9), (8, 0, 8)])
def test_ds_that_is_placed_has_the_bits_of_ds_that_is_not(ranks: tuple[int, ...]):
    """Of every job's own columns, in parts of linears whose widths differ; each slot has them too,
    and zeros beside them."""
    from tlora.kernels.multi_lora import triton_backward

    # With the first token alone of eight that a program has, and with the last.
    jobs = [
        in_eights(0, 153, 1, ranks),
        in_eights(153, 153, 3, ranks),
        in_eights(167, 289, 0, ranks),
    ]
    problem = Problem(jobs, "backward", 3)
    columns = sum(-(-rank // 8) * 8 for rank in ranks)
    ds, slots = problem.placed()
    usual = torch.full_like(ds, torch.nan)
    tuning = Tuning(tokens=8, features=0, programs=16)
    triton_backward.sum_parts(
        usual, problem.parts, list(problem.depths), TILE, problem.blocks, tuning
    )
    for job in (jobs[0], jobs[2]):
        here = slice(job.start, job.stop)
        assert torch.equal(ds[here, :columns], usual[here, :columns])
    assert ds[153:167].isnan().all() and ds[289:].isnan().all()
    found = pages.find(jobs, TOKENS, ("backward",))
    for block, slot, values in zip(found.block, found.slot, found.values, strict=True):
        start, stop, col, rank = values[:4].tolist()
        tokens = slice(block * pages.BLOCK, min(TOKENS, (block + 1) * pages.BLOCK))
        wanted = torch.zeros(TOKENS, pages.PAGE, device=DEVICE, dtype=DTYPE)
        wanted[start:stop, :rank] = usual[start:stop, col : col + rank]
        assert torch.equal(slots[tokens, slot * pages.PAGE :][:, : pages.PAGE], wanted[tokens])


@runs_kernels
def test_b_turned_has_every_column_that_a_page_reads():
    """Rank rows of each job and zeros up to the next; behind the last one a page of zeros."""
    jobs = [segment(0, 60, 0, 5), segment(70, 70, 1, 8), segment(70, 250, 2, 150)]
    problem = Problem(jobs, "forward")
    _, turned = triton_pages.lay(problem.s, problem.rows, problem.blocks)
    for linear, (found, rows) in enumerate(zip(turned, problem.rows, strict=True)):
        wanted = rows.new_zeros(rows.shape[1], 16 + 160 + pages.PAGE)
        first = 0
        for job in (jobs[0], jobs[2]):
            rank, row = job.ranks[linear], job.b_rows[linear]
            wanted[:, first : first + rank] = rows[row : row + rank].T
            first += -(-rank // 16) * 16
        assert torch.equal(found[:, : first + pages.PAGE], wanted[:, : first + pages.PAGE]), linear


@runs_kernels
def test_nothing_is_laid_beyond_its_tensors(monkeypatch):
    """Of a layout that has room for these jobs and no other, of linears that end within a tile and
    are not equally wide, of tokens that end within a block: what lies behind stays as it is."""
    monkeypatch.setattr(settings, "LAY", replace(settings.LAY, features=32))
    jobs = [
        Segment(0, 130, 0, (70, 80, 0), (3, 0, 0), SCALE),
        Segment(130, TOKENS, 150, (80, 3, 80), (80, 100, 9), SCALE),
    ]
    widths = (72, 136, 40)
    layout = Layout(
        num_tokens=TOKENS, in_features=DEPTH, out_features=widths, max_segments=2, max_rank=80,
        dropout=False, inside=("forward", "backward"),
    )  # fmt: skip
    blocks = Blocks.new(layout, DEVICE)
    blocks.copy(jobs)
    torch.manual_seed(SEED)
    s, b = torch.zeros_like(randn(TOKENS, layout.s_width)), [randn(200, width) for width in widths]
    behind, new_empty = [], torch.Tensor.new_empty

    def guarded(like: torch.Tensor, *shape: int, **options) -> torch.Tensor:
        if options:  # The interpreter's own.
            return new_empty(like, *shape, **options)
        size = math.prod(shape)
        whole = torch.full((size + (1 << 19),), torch.nan, device=DEVICE, dtype=DTYPE)
        behind.append(whole[size:])
        return whole[:size].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", guarded)
    slots, turned = triton_pages.lay(s, b, blocks)
    assert not slots[:, : pages.PAGE].any(), "S is zero"
    for linear, (found, rows) in enumerate(zip(turned, b, strict=True)):
        first = 0
        for job in jobs:
            rank, row = job.ranks[linear], job.b_rows[linear]
            assert torch.equal(found[:, first : first + rank], rows[row : row + rank].T)
            first += -(-rank // 16) * 16
    slots = triton_pages.new_slots(s)
    part = randn(3, TOKENS, layout.s_width)
    triton_pages.sum_into_slots(
        torch.empty_like(s), slots, part, list(widths), TILE, blocks, tokens=8, parts=2
    )
    assert len(behind) == 5, "slots each way, and B of three linears"
    assert all(each.isnan().all() for each in behind)
