"""What `gpu_lora_kernels.py` launches: groups of linears of a Llama layer, their tensors, the bytes
that a kernel must move."""

from dataclasses import dataclass

import torch
from kernel_candidates import Candidate
from layer_shapes import SHAPES

from tlora.kernels.multi_lora import triton_backward as backward
from tlora.kernels.multi_lora import triton_forward as forward
from tlora.kernels.multi_lora.blocks import Blocks, Layout
from tlora.kernels.multi_lora.tables import Segment

MODELS = SHAPES | {"dry": {"qkv": (64, (512, 256, 256)), "down": (96, (256,))}}
LAYERS = {"8b": 32, "1b": 16, "dry": 1}
RANKS = (8, 16, 32, 64)
# What one H200 reads and writes when it does nothing else (README.md of the kernels), bytes per us.
READ, WRITE = 4.3e6, 3.4e6


class Layer:
    """The tensors of one layer's group: activations, pools in half precision, gradients."""

    def __init__(self, place: "Place", width: int, device: str, real: bool):
        num_tokens = place.num_tokens
        num_in, outs = place.features
        dtype = torch.bfloat16 if device == "cuda" or not real else torch.float32
        rows = sum(place.ranks)

        def random(*shape, scale=1.0, dtype=dtype):
            if not real:
                return torch.empty(*shape, dtype=dtype)
            return (torch.randn(*shape, device=device) * scale).to(dtype)

        self.x = random(num_tokens, num_in)
        self.dy = [random(num_tokens, o, scale=0.1) for o in outs]
        self.s, self.ds = random(num_tokens, width), random(num_tokens, width)
        self.a = random(rows * len(outs), num_in, scale=num_in**-0.5)
        self.b = [random(rows, o, scale=0.1) for o in outs]
        self.grad_a = random(rows * len(outs), num_in, dtype=torch.float32)
        self.grad_b = [random(rows, o, dtype=torch.float32) for o in outs]
        self.y = [torch.empty_like(dy) for dy in self.dy]
        self.dx = torch.empty_like(self.x)
        self.rows = torch.zeros(num_tokens, dtype=torch.int32, device=self.x.device)


@dataclass(frozen=True)
class Place:
    """Where a kernel runs: which model's group, how many tokens of how many jobs."""

    model: str
    group: str
    num_tokens: int
    jobs: int = 8

    zero: bool = False
    """Gradients are marked as zero, and not read."""

    uneven: bool = False
    """Jobs have from half to one and a half of their tokens."""

    @property
    def sequence(self) -> int:
        """Tokens of one: so many jobs should have some."""
        return 24 if self.model == "dry" else 512 if self.jobs <= 16 else 256

    @property
    def ranks(self) -> list[int]:
        return [RANKS[i % len(RANKS)] for i in range(self.jobs)]

    @property
    def features(self) -> tuple:
        return MODELS[self.model][self.group]

    @property
    def outs(self) -> tuple[int, ...]:
        return self.features[1]

    @property
    def segments(self) -> list[Segment]:
        """Jobs of one or more whole sequences, as many as fit, in the order of their ranks."""
        per_job = max(1, self.num_tokens // self.sequence // self.jobs) * self.sequence
        linears = len(self.outs)
        segments, a_row, b_row, start = [], 0, 0, 0
        for i, rank in enumerate(self.ranks):
            share = 1 + (7 * i % 5 - 2) / 4 if self.uneven else 1
            stop = min(start + round(share * per_job), self.num_tokens)
            if stop > start:
                ranks, b_rows = (rank,) * linears, (b_row,) * linears
                segments.append(
                    Segment(start, stop, a_row, ranks, b_rows, scale=16 / rank, zero_grad=self.zero)
                )
            start, a_row, b_row = stop, a_row + rank * linears, b_row + rank
        return segments

    def layout(self, candidate: Candidate) -> Layout:
        return Layout(
            num_tokens=self.num_tokens,
            in_features=self.features[0],
            out_features=self.outs,
            max_segments=64,
            max_rank=64,
            dropout=False,
            tiles=candidate.tiles(self.num_tokens),
        )


def part_of(layer: Layer, tile: int) -> torch.Tensor:
    tiles = -(-max(dy.shape[1] for dy in layer.dy) // tile)
    return layer.s.new_empty(tiles, *layer.s.shape)


def launch(kernel: str, layer: Layer, blocks: Blocks, candidate: Candidate, part) -> None:
    """One launch; `part` is what `reduce_b` writes and `sum` reads."""
    n = blocks.layout.num_linears
    common = (blocks, layer.rows, list(range(n)))
    t = candidate.tuning
    match kernel:
        case "shrink_x":
            forward.shrink(layer.s, [layer.x] * n, [layer.a] * n, *common, name=kernel, tuning=t)
        case "expand_y":
            forward.expand(layer.y, layer.s, layer.b, *common, name=kernel, write=True, tuning=t)
        case "expand_dx":
            forward.expand(
                [layer.dx], layer.ds, [layer.a], *common, name=kernel, write=True, tuning=t
            )
        case "reduce_a":
            backward.reduce(
                [layer.grad_a] * n, layer.ds, [layer.x] * n, *common, name=kernel, tuning=t
            )
        case "reduce_b":
            backward.reduce(
                layer.grad_b, layer.s, layer.dy, *common, name=kernel, tuning=t, w=layer.b,
                part=part,
            )  # fmt: skip
        case "sum":
            features = [dy.shape[1] for dy in layer.dy]
            backward.sum_parts(layer.ds, part, features, sum_tile(part, features), blocks, t)


def sum_tile(part: torch.Tensor, features: list[int]) -> int:
    return -(-max(features) // part.shape[0])


def floor_us(kernel: str, place: Place, part_tiles: int) -> tuple[float, float]:
    """Bytes that must move, and the time that they take: everything once, gradients twice."""
    num_in, outs = place.features
    present = [s for s in place.segments if s.stop > s.start]
    rank_rows = sum(s.ranks[0] for s in present)
    tokens = sum(s.stop - s.start for s in present)
    n = len(outs)
    s_bytes = 2 * n * sum((s.stop - s.start) * s.ranks[0] for s in present)
    x, y = 2 * tokens * num_in, 2 * tokens * sum(outs)
    a, b = rank_rows * n * num_in, rank_rows * sum(outs)
    read, write = {
        "shrink_x": (x + 2 * a, s_bytes),
        "expand_y": (s_bytes + 2 * b, y),
        "expand_dx": (s_bytes + 2 * a, x),
        "reduce_a": (x + s_bytes + 4 * a, 4 * a),
        "reduce_b": (y + s_bytes + 6 * b, 4 * b),
        "sum": (s_bytes * part_tiles / n * sum(outs) / max(outs), s_bytes),
    }[kernel]
    return read + write, read / READ + write / WRITE
