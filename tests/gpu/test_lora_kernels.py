"""The multi-LoRA kernels in bfloat16 at sizes where every program takes several items."""

from dataclasses import replace

import pytest
import torch
from support.interpreter import SEED

from tlora.kernels.multi_lora import reference
from tlora.kernels.multi_lora.blocks import Blocks, Layout, Tiles
from tlora.kernels.multi_lora.pages import Way
from tlora.kernels.multi_lora.settings import TUNINGS, Tuning
from tlora.kernels.multi_lora.tables import Segment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
TOKENS, WIDTH, OUTS = 2048, 2048, (2048, 512, 512)
LIMIT = 6e-3
LARGE = TUNINGS["reduce_b large"]
SETTINGS: dict[str, Tuning] = {
    "settings": LARGE,
    "one program per item": replace(LARGE, programs=0),
    "one program": replace(LARGE, programs=1, turned=0),
    "turned, two programs": Tuning(
        tokens=64, features=128, warps=8, stages=3, registers=128, programs=2, turned=128
    ),
}


def segments(scale: float = 1.0) -> list[Segment]:
    """Jobs of rank 8 to 64, one of them twice as long as a chunk, and a gap."""
    edges = [(0, 1100, 64), (1100, 1400, 8), (1400, 1401, 24), (1500, 2048, 32)]
    found, a_row, b_row = [], 0, 0
    for start, stop, rank in edges:
        ranks, b_rows = (rank,) * 3, (b_row,) * 3
        found.append(Segment(start, stop, a_row, ranks, b_rows, scale=scale))
        a_row, b_row = a_row + 3 * rank, b_row + rank
    return found


class Problem:
    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(SEED + 3)

        def random(*shape, dtype=torch.bfloat16):
            return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

        self.x, self.dy = random(TOKENS, WIDTH), [random(TOKENS, out) for out in OUTS]
        self.a, self.b = random(384, WIDTH) * WIDTH**-0.5, [random(128, out) for out in OUTS]
        self.rows = torch.zeros(TOKENS, dtype=torch.int32, device="cuda")
        layout = Layout(
            num_tokens=TOKENS,
            in_features=WIDTH,
            out_features=OUTS,
            max_segments=64,
            max_rank=64,
            dropout=False,
            tiles=Tiles.for_tokens(TOKENS),
        )
        self.blocks = Blocks.new(layout, "cuda")
        self.blocks.copy(segments())

    def gradients(self, tuning: Tuning) -> list[torch.Tensor]:
        from tlora.kernels.multi_lora import triton_backward, triton_forward

        grad_a = torch.zeros(self.a.shape, device="cuda")
        grad_b = [torch.zeros(b.shape, device="cuda") for b in self.b]
        common = (self.blocks, self.rows, [0, 1, 2])
        s = self.x.new_full((TOKENS, self.blocks.layout.s_width), float("nan"))
        triton_forward.shrink(s, [self.x] * 3, [self.a] * 3, *common, name="shrink_x")
        ds = torch.full_like(s, float("nan"))
        triton_backward.reduce_fused(ds, grad_b, s, self.dy, self.b, *common, tuning=tuning)
        triton_backward.reduce([grad_a] * 3, ds, [self.x] * 3, *common, name="reduce_a")
        assert not self.blocks.finished.any(), "counters must be zero again"
        return [grad_a, *grad_b]

    def expected(self, scale: float) -> list[torch.Tensor]:
        values = (self.x, self.dy, self.a.float(), [b.float() for b in self.b])
        grads = reference.backward(*values, segments(scale), self.rows, [0, 1, 2])
        return [grads.a, *grads.b]


def errors(found: list[torch.Tensor], right: list[torch.Tensor]) -> list[float]:
    return [float((u - v).norm() / v.norm()) for u, v in zip(found, right, strict=True)]


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_match_the_reference_whatever_the_setting(name: str):
    """Twice the same bits, and a scale off by 1 % is refused."""
    torch.backends.cuda.matmul.allow_tf32 = False
    problem = Problem()
    found = problem.gradients(SETTINGS[name])
    # Not the largest of them, which a NaN need not be.
    assert all(error < LIMIT for error in errors(found, problem.expected(1.0)))
    assert all(twin > LIMIT for twin in errors(found, problem.expected(1.01)))
    again = problem.gradients(SETTINGS[name])
    assert all(torch.equal(u, v) for u, v in zip(found, again, strict=True))


def test_which_program_takes_an_item_changes_no_bit():
    problem = Problem()
    first = problem.gradients(LARGE)
    second = problem.gradients(replace(LARGE, programs=0))
    assert all(torch.equal(u, v) for u, v in zip(first, second, strict=True))


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_products_with_the_update_inside_match_the_reference(way: Way):
    """As the engine launches them, with several jobs in a block and tokens that end within one.
    Twice the same bits; another number of programs and other tiles give them too; an update off by
    3 % is refused."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("products with the update inside are for Hopper")
    from tlora.kernels.multi_lora import pages, triton_pages, triton_product
    from tlora.kernels.multi_lora.settings import PRODUCT

    tokens, depth, width = 4000, 2048, 8192
    jobs = [
        Segment(20 * i * i, min(tokens, 20 * (i + 1) ** 2), 70 * i, (rank,), (70 * i + 3,), 1.0)
        for i, rank in enumerate([8, 64, 16, 32, 5, 128, 64] * 2)
    ]
    layout = Layout(
        num_tokens=tokens,
        in_features=depth if way == "forward" else width,
        out_features=(width if way == "forward" else depth,),
        max_segments=64,
        max_rank=128,
        dropout=False,
        inside=(way,),
    )
    assert len({*pages.find(jobs, tokens, layout.inside).slot.tolist()}) >= 3
    blocks = Blocks.new(layout, "cuda")
    blocks.copy(jobs)
    generator = torch.Generator("cuda").manual_seed(SEED + 5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    x, s, rows = random(tokens, depth), random(tokens, layout.s_width), random(1200, width) / 8
    w = random(depth, width) * depth**-0.5
    parts = random(3, tokens, layout.s_width) / 2
    for each in jobs:
        # As kernels leave it: zeros behind a rank, up to a multiple of eight.
        here, rank = slice(each.start, each.stop), each.ranks[0]
        parts[:, here, rank : -(-rank // 8) * 8] = 0.0
    if way == "backward":
        s = parts.float().sum(0)
    update = torch.zeros(tokens, width, device="cuda")
    for each in jobs:
        here, rank = slice(each.start, each.stop), each.ranks[0]
        first = each.b_rows[0] if way == "forward" else each.a_row
        update[here] = s[here, :rank].float() @ rows[first : first + rank].float()
    frozen = x.float() @ w.float()

    def product(tuning: Tuning) -> torch.Tensor:
        y = torch.full((tokens, width), float("nan"), device="cuda", dtype=torch.bfloat16)
        if way == "forward":
            slots, turned = triton_pages.lay(s, [rows], blocks)
            laid = triton_product.Update(slots, turned, blocks, way)
        else:
            ds = torch.empty_like(parts[0])
            slots = triton_pages.new_slots(ds)
            triton_pages.sum_into_slots(
                ds, slots, parts, [depth], depth // 3 + 1, blocks, tokens=8, parts=8
            )
            laid = triton_product.Update(slots, [rows], blocks, way)
        weights = [w.T.contiguous() if way == "forward" else w]
        by_feature = way == "forward"
        triton_product.product([y], [x], weights, by_feature=by_feature, update=laid, tuning=tuning)
        return y

    torch.backends.cuda.matmul.allow_tf32 = False
    found = product(PRODUCT)
    assert errors([found.float()], [frozen + update])[0] < LIMIT
    assert errors([found.float()], [frozen + 1.03 * update])[0] > LIMIT
    assert torch.equal(found, product(PRODUCT))
    assert torch.equal(found, product(replace(PRODUCT, programs=2)))
    assert torch.equal(found, product(replace(PRODUCT, features=128)))
