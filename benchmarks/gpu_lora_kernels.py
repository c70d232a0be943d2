"""Every multi-LoRA kernel of a training step under several settings, beside its byte floor.

    python benchmarks/gpu_lora_kernels.py --json kernels.jsonl          # all of it, about 90 s
    python benchmarks/gpu_lora_kernels.py --models 8b --kernels reduce_b sum
    python benchmarks/gpu_lora_kernels.py --models 8b --groups gate_up --jobs 32 --settings 64x256
    TRITON_INTERPRET=1 python benchmarks/gpu_lora_kernels.py --dry      # the script itself, no GPU

No model is needed: the linears of a Llama 8B or 1B layer, random values, eight jobs of rank 8, 16,
32, 64 twice (or --jobs), sequences of 512 (at 2,048 tokens four of the jobs have tokens). Launches
rotate over the buffers of several layers, so that the L2 cache is cold, in a captured graph, so
that the host does not count. Each setting is compared with a float32 product of the same values,
outputs poisoned with NaN; a product 1 % off must be refused. One JSON line per row is written as it
is measured.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from dataclasses import dataclass, replace

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tlora.kernels.multi_lora import settings
from tlora.kernels.multi_lora import triton_backward as backward
from tlora.kernels.multi_lora import triton_forward as forward
from tlora.kernels.multi_lora.blocks import Blocks, Layout, Tiles
from tlora.kernels.multi_lora.settings import Tuning
from tlora.kernels.multi_lora.tables import Segment

MODELS = {
    "8b": {
        "qkv": (4096, (4096, 1024, 1024)),
        "o": (4096, (4096,)),
        "gate_up": (4096, (14336, 14336)),
        "down": (14336, (4096,)),
    },
    "1b": {
        "qkv": (2048, (2048, 512, 512)),
        "o": (2048, (2048,)),
        "gate_up": (2048, (8192, 8192)),
        "down": (8192, (2048,)),
    },
    "dry": {"qkv": (64, (64, 32, 32)), "down": (96, (64,))},
}
LAYERS = {"8b": 32, "1b": 16, "dry": 1}
RANKS = (8, 16, 32, 64)
# What one H200 reads and writes when it does nothing else (README.md of the kernels), bytes per us.
READ, WRITE = 4.3e6, 3.4e6
KERNELS = ("reduce_b", "sum", "reduce_a", "expand_y", "expand_dx", "shrink_x")
# Values in half precision are off by up to 3.8e-3; gradients are float32.
LIMITS = {"reduce_a": 2e-3, "reduce_b": 2e-3}
LIMIT = 6e-3


@dataclass(frozen=True)
class Candidate:
    """A setting by name."""

    name: str
    tuning: Tuning
    chunk: int = 0
    """Tokens of a chunk (`reduce`) or of an item (`expand`); 0: as settings.py says."""

    stack: int = 0
    """Rank rows of the gradient of A that a program holds."""

    block: int = 0
    """Tokens of a block of `shrink`."""

    core: bool = False
    """Timed for every model; the rest for the first only."""

    def tiles(self, num_tokens: int) -> Tiles:
        tiles = Tiles.for_tokens(num_tokens)
        if self.chunk:
            tiles = replace(tiles, chunk_tokens=self.chunk, expand_tokens=self.chunk)
        if self.block:
            tiles = replace(tiles, shrink_tokens=self.block)
        return replace(tiles, stack_rank=self.stack) if self.stack else tiles


def _tuned(tokens, features, warps, stages, programs, **more) -> Tuning:
    return Tuning(
        tokens=tokens, features=features, warps=warps, stages=stages, programs=programs, **more
    )


def _default(kernel: str) -> Candidate:
    shape = settings.Shape(num_tokens=8192, max_rank=64, width=64)
    return Candidate("default", settings.tuning(kernel, shape), core=True)


def candidates(kernel: str, num_tokens: int) -> list[Candidate]:
    """wN: warps, sN: stages, pN: programs per multiprocessor, rN: most registers. `turned<64`: rank
    tiles below 64 as [features, rank rows]. A star marks what settings.py says."""
    c, t = Candidate, _tuned
    # The usual chunk is a job's tokens where jobs are as long as here.
    other = 256 if num_tokens <= 2048 else 512
    expand = settings.expand_tokens(num_tokens)
    few = {"turned": 64, "registers": 128}
    lists = {
        "reduce_b": [
            c("one program per item", t(128, 256, 8, 2, 0), core=True),
            c("128x256 w8 s2 p1", t(128, 256, 8, 2, 1), core=True),
            c("128x256 w8 s2 p1 turned<64", t(128, 256, 8, 2, 1, turned=64), core=True),
            c("128x256 w8 s2 p1 turned", t(128, 256, 8, 2, 1, turned=128)),
            c("64x256 w8 s3 p1 turned<64", t(64, 256, 8, 3, 1, turned=64), core=True),
            c("64x256 w16 s3 p1 turned<64", t(64, 256, 16, 3, 1, turned=64)),
            c("32x256 w8 s3 p2 turned", t(32, 256, 8, 3, 2, turned=128, registers=128)),
            c("32x256 w8 s3 p1 turned<64", t(32, 256, 8, 3, 1, turned=64)),
            c("64x128 w8 s3 p2 turned<64", t(64, 128, 8, 3, 2, **few), core=True),
            c("64x128 w4 s3 p2 turned<64", t(64, 128, 4, 3, 2, turned=64), core=True),
            c("64x128 w4 s3 p2", t(64, 128, 4, 3, 2)),
            c("128x128 w8 s2 p1 turned<64", t(128, 128, 8, 2, 1, turned=64)),
            c("128x256 w8 s2 p1 turned<64, chunk", t(128, 256, 8, 2, 1, turned=64), other),
            c("64x128 w8 s3 p2 turned<64, chunk", t(64, 128, 8, 3, 2, **few), other, core=True),
        ],
        "sum": [
            c("one program per item", t(32, 0, 4, 3, 0), core=True),
            c("16 w4 p8", t(16, 0, 4, 3, 8), core=True),
            c("8 w2 p16", t(8, 0, 2, 3, 16)),
        ],
        "reduce_a": [
            c("one program per item", t(64, 64, 4, 3, 0, registers=128), core=True),
            c("64x64 w4 s3 p4", t(64, 64, 4, 3, 4, registers=128), core=True),
            c("64x64 w4 s3 p4 turned<64", t(64, 64, 4, 3, 4, **few), core=True),
            c("64x64 w4 s3 p4 turned", t(64, 64, 4, 3, 4, turned=128)),
            c("64x128 w4 s3 p3 turned<64", t(64, 128, 4, 3, 3, turned=64, registers=168)),
            c("64x128 w8 s3 p2 turned<64", t(64, 128, 8, 3, 2, **few), core=True),
            c("128x128 w8 s2 p2 turned<64", t(128, 128, 8, 2, 2, **few), core=True),
            c("64x256 w8 s3 p1 turned<64", t(64, 256, 8, 3, 1, turned=64)),
            c("64x64 w4 s3 p3 stack 128", t(64, 64, 4, 3, 3, turned=256, registers=168), 0, 128),
            c("64x128 w8 s3 p2 stack 128", t(64, 128, 8, 3, 2, **few), 0, 128, core=True),
            c("64x64 w4 s3 p4 turned<64, chunk", t(64, 64, 4, 3, 4, **few), other),
            c("64x128 w8 s3 p2 turned<64, chunk", t(64, 128, 8, 3, 2, **few), other, core=True),
        ],
        "expand_y": [
            c("64x128 w4 s2 p8", t(64, 128, 4, 2, 8), core=True),
            c("64x128 w4 s3 p8", t(64, 128, 4, 3, 8), core=True),
            c("64x128 w4 s2 p4", t(64, 128, 4, 2, 4)),
            c("64x128 w4 s2 p4, items of 512", t(64, 128, 4, 2, 4), 512, core=True),
            c("64x128 w4 s2 p8, items halved", t(64, 128, 4, 2, 8), expand // 2),
            c("64x256 w8 s2 p2", t(64, 256, 8, 2, 2, registers=128), core=True),
            c("64x256 w8 s2 p4, items of 512", t(64, 256, 8, 2, 4, registers=128), 512),
            c("128x128 w8 s2 p2", t(128, 128, 8, 2, 2, registers=128), core=True),
            c("64x64 w4 s3 p8", t(64, 64, 4, 3, 8)),
        ],
        "expand_dx": [
            c("64x128 w4 s2 p8", t(64, 128, 4, 2, 8), core=True),
            c("64x128 w4 s3 p8", t(64, 128, 4, 3, 8), core=True),
            c("64x128 w4 s2 p4", t(64, 128, 4, 2, 4)),
            c("64x128 w4 s2 p4, items of 512", t(64, 128, 4, 2, 4), 512, core=True),
            c("64x128 w4 s2 p8, items halved", t(64, 128, 4, 2, 8), expand // 2),
            c("64x64 w4 s2 p8", t(64, 64, 4, 2, 8), core=True),
            c("128x128 w8 s2 p2", t(128, 128, 8, 2, 2, registers=128)),
        ],
        "shrink": [
            c("128x128 w8 s3 p1", t(128, 128, 8, 3, 1), block=128, core=True),
            c("128x128 w8 s3 p1, more parts", t(128, 128, 8, 3, 1, parts=264), block=128),
            c("128x64 w8 s3 p2", t(128, 64, 8, 3, 2, registers=128), block=128, core=True),
            c("64x64 w4 s3 p3", t(64, 64, 4, 3, 3, parts=264, registers=168), core=True),
            c("64x64 w4 s3 p2", t(64, 64, 4, 3, 2, parts=264)),
            c("64x64 w4 s4 p2", t(64, 64, 4, 4, 2, parts=264), core=True),
            c("64x64 w4 s4 p3", t(64, 64, 4, 4, 3, parts=264), core=True),
            c("64x128 w4 s3 p2", t(64, 128, 4, 3, 2, parts=264)),
            c("64x128 w4 s3 p1", t(64, 128, 4, 3, 1, parts=264)),
        ],
    }
    name = "shrink" if kernel == "shrink_x" else kernel
    usual = _default(name)
    found: dict[tuple, Candidate] = {}
    for one in [*lists[name], usual]:
        found.setdefault((one.tuning, one.chunk, one.stack, one.block), one)
    key = (usual.tuning, 0, 0, 0)
    found[key] = replace(found[key], name=found[key].name + " *", core=True)
    return list(found.values())


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


class Reference:
    """What a kernel must give for one layer's values, in float32."""

    def __init__(self, layer: Layer, place: Place):
        self.layer, self.segments = layer, place.segments
        self.num_linears = len(place.outs)

    def _pieces(self):
        for segment in self.segments:
            col, row = 0, segment.a_row
            for i, rank in enumerate(segment.ranks):
                tokens, columns = slice(segment.start, segment.stop), slice(col, col + rank)
                b_rows = slice(segment.b_rows[i], segment.b_rows[i] + rank)
                yield segment, i, tokens, columns, slice(row, row + rank), b_rows
                col, row = col + rank, row + rank

    def expected(self, kernel: str, part: torch.Tensor | None) -> list[torch.Tensor]:
        layer = self.layer
        like = {
            "shrink_x": [layer.s],
            "sum": [layer.ds],
            "expand_y": layer.y,
            "expand_dx": [layer.dx],
            "reduce_a": [layer.grad_a],
            "reduce_b": layer.grad_b,
        }[kernel]
        out = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in like]
        for segment, i, tokens, columns, a_rows, b_rows in self._pieces():
            if kernel == "shrink_x":
                value = layer.x[tokens].float() @ layer.a[a_rows].float().T
                out[0][tokens, columns] = segment.scale * value
            elif kernel == "sum":
                tiles = -(-layer.dy[i].shape[1] // sum_tile(part, [d.shape[1] for d in layer.dy]))
                out[0][tokens, columns] = segment.scale * part[:tiles, tokens, columns].float().sum(
                    0
                )
            elif kernel == "expand_y":
                out[i][tokens] = layer.s[tokens, columns].float() @ layer.b[i][b_rows].float()
            elif kernel == "expand_dx":
                out[0][tokens] += layer.ds[tokens, columns].float() @ layer.a[a_rows].float()
            elif kernel == "reduce_a":
                out[0][a_rows] = layer.ds[tokens, columns].float().T @ layer.x[tokens].float()
            else:
                out[i][b_rows] = layer.s[tokens, columns].float().T @ layer.dy[i][tokens].float()
        return out

    def part_expected(self) -> torch.Tensor:
        """dY B^T: what the parts of reduce_b must add up to."""
        layer = self.layer
        out = torch.zeros(layer.s.shape, dtype=torch.float32, device=layer.s.device)
        for _, i, tokens, columns, _, b_rows in self._pieces():
            out[tokens, columns] = layer.dy[i][tokens].float() @ layer.b[i][b_rows].float().T
        return out

    def written(self, kernel: str) -> torch.Tensor | None:
        """Where S or dS is written at all."""
        if kernel not in ("shrink_x", "sum"):
            return None
        mask = torch.zeros(self.layer.s.shape, dtype=torch.bool, device=self.layer.s.device)
        for _, _, tokens, columns, _, _ in self._pieces():
            mask[tokens, columns] = True
        return mask


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm().clamp(min=1e-30))


def check(
    kernel: str, layer: Layer, blocks: Blocks, candidate: Candidate, part, known: dict, place
):
    """The worst relative error, and the least that a twin 1 % off would show."""
    reference = Reference(layer, place)
    outputs = {
        "shrink_x": [layer.s],
        "sum": [layer.ds],
        "expand_y": layer.y,
        "expand_dx": [layer.dx],
        "reduce_a": [layer.grad_a],
        "reduce_b": layer.grad_b,
    }[kernel]
    key = (kernel, part.shape[0] if kernel == "sum" else 0)
    if kernel == "sum":
        known.pop(key, None)
    if key not in known:
        known[key] = reference.expected(kernel, part)
    expected = known[key]
    before = [o.clone() for o in outputs]
    if not kernel.startswith("reduce"):
        for output in outputs:
            output.fill_(float("nan"))
    elif part is not None:
        part.fill_(float("nan"))
    launch(kernel, layer, blocks, candidate, part)
    mask = reference.written(kernel)
    pairs = []
    for output, old, right in zip(outputs, before, expected, strict=True):
        found = output.float() - old if kernel.startswith("reduce") else output
        if kernel.startswith("reduce") and place.zero:
            # Rows of jobs without tokens stay as they are.
            found = torch.where((right != 0).any(1, keepdim=True), output, found)
        if mask is not None:
            found, right = found[mask], right[mask]
        pairs.append((found, right))
    if kernel == "reduce_b":
        if "parts" not in known:
            known["parts"] = reference.part_expected()
        mask = known["parts"] != 0
        tile = candidate.tuning.features
        sums = torch.zeros_like(known["parts"])
        for _, i, tokens, columns, _, _ in reference._pieces():
            tiles = -(-layer.dy[i].shape[1] // tile)
            sums[tokens, columns] = part[:tiles, tokens, columns].float().sum(0)
        pairs.append((sums[mask], known["parts"][mask]))
    errors = [relative(found, right) for found, right in pairs]
    twins = [relative(found, 1.01 * right) for found, right in pairs]
    for output, old in zip(outputs, before, strict=True):
        output.copy_(old)
    limits = [LIMITS.get(kernel, LIMIT)] * len(outputs) + [LIMIT] * (len(pairs) - len(outputs))
    ok = all(e < lim < t for e, t, lim in zip(errors, twins, limits, strict=True))
    clean = not bool(blocks.finished.any())
    return max(errors), min(twins), bool(ok and clean)


def time_us(steps: list, rounds: int, device: str) -> float:
    """Median microseconds of one step when all run one after another."""
    if device != "cuda":
        start = time.perf_counter()
        for step in steps[:1]:
            step()
        return (time.perf_counter() - start) * 1e6
    # Not torch.cuda.graph: it collects garbage and empties the allocator each time.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        for step in steps:
            step()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    samples = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        graph.replay()
        stop.record()
        stop.synchronize()
        samples.append(start.elapsed_time(stop) * 1e3 / 2 / len(steps))
    graph.reset()
    return statistics.median(samples)


_last_compiled: list = []


def _remember_compiled() -> None:
    """Keep what was compiled last, for its registers; the interpreter has none."""
    original = JITFunction.run

    def run(self, *args, **kwargs):
        compiled = original(self, *args, **kwargs)
        _last_compiled[:] = [compiled]
        return compiled

    JITFunction.run = run


def resources() -> dict:
    compiled = _last_compiled[0] if _last_compiled else None
    if compiled is None:
        return {}
    return {
        "registers": getattr(compiled, "n_regs", None),
        "spills": getattr(compiled, "n_spills", None),
        "shared": getattr(compiled.metadata, "shared", None),
    }


class _Compiler:
    """Stands in for the device in processes that only fill Triton's cache on disk."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0


def _start_compiler(target) -> None:
    torch.set_num_threads(1)
    driver.set_active(_Compiler(target))
    original = JITFunction.run

    def run(self, *args, **kwargs):
        return original(self, *args, **{**kwargs, "warmup": True})

    JITFunction.run = run


def _compile(kernel: str, place: Place, candidate: Candidate, tile: int) -> str:
    """Compile what `launch` would; the message if that fails."""
    try:
        layout = place.layout(candidate)
        layer = Layer(place, layout.s_width, "cpu", real=False)
        part = part_of(layer, tile) if tile else None
        launch(kernel, layer, Blocks.new(layout, "cpu"), candidate, part)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
    return ""


def commit() -> str | None:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return run.stdout.strip() or None


def versions() -> dict:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__}
    return {"device": device, "versions": found}


def stable(*values) -> int:
    return zlib.crc32(repr(values).encode())


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.device = "cpu" if args.dry else "cuda"
        self.began = time.monotonic()
        self.file = open(args.json, "a") if args.json else None  # noqa: SIM115
        self.rows: list[dict] = []
        self.compiled: dict = {}
        self.pool: concurrent.futures.ProcessPoolExecutor | None = None
        self.facts = {"v": 1, "kind": "gpu_lora_kernels", "commit": commit(), **versions()}
        self.facts["command"] = " ".join(["python", *sys.argv])

    def work(self):
        """What to measure, in order."""
        for index, model in enumerate(self.args.models):
            for num_tokens in self.args.tokens:
                for group in self.groups(model):
                    place = Place(
                        model, group, num_tokens, self.args.jobs, self.args.zero, self.args.uneven
                    )
                    for kernel in self.args.kernels:
                        chosen = candidates(kernel, num_tokens)
                        for candidate in filter(self.is_asked_for, chosen):
                            if index == 0 or candidate.core:
                                for tile in self.tiles_of(kernel, candidate):
                                    yield place, kernel, candidate, tile

    def is_asked_for(self, candidate: Candidate) -> bool:
        begins = tuple(self.args.settings or [""])
        return candidate.name.startswith(begins) or candidate.name.endswith("*")

    def groups(self, model: str) -> list[str]:
        return [group for group in MODELS[model] if group in (self.args.groups or MODELS[model])]

    def tiles_of(self, kernel: str, candidate: Candidate) -> list[int]:
        """Features of a part: of reduce_b's own tile; for `sum` both that are in question."""
        if kernel == "reduce_b":
            return [candidate.tuning.features]
        return [256, 128] if kernel == "sum" else [0]

    def key(self, place: Place, kernel: str, candidate: Candidate, tile: int):
        """What the compiled code depends on."""
        tokens = place.num_tokens if kernel == "shrink_x" else 0
        tuning = replace(candidate.tuning, programs=min(1, candidate.tuning.programs))
        return place.model, place.group, kernel, tuning, candidate.stack, tile, tokens

    def compile_ahead(self) -> None:
        if self.device != "cuda" or self.args.workers < 2:
            return
        target = driver.active.get_current_target()
        context = multiprocessing.get_context("spawn")
        self.pool = concurrent.futures.ProcessPoolExecutor(
            self.args.workers, mp_context=context, initializer=_start_compiler, initargs=(target,)
        )
        for place, kernel, candidate, tile in self.work():
            key = self.key(place, kernel, candidate, tile)
            if key not in self.compiled:
                self.compiled[key] = self.pool.submit(_compile, kernel, place, candidate, tile)

    def compile_error(self, key) -> str:
        future = self.compiled.get(key)
        if future is None:
            return ""
        try:
            return future.result(timeout=60)
        except Exception as error:  # the pool itself failed: compile here
            print("compiling ahead failed:", type(error).__name__, error, flush=True)
            self.compiled.clear()
            return ""

    def run(self) -> None:
        self.compile_ahead()
        for place, items in itertools.groupby(self.work(), key=lambda item: item[0]):
            if self.out_of_time():
                break
            self.run_place(place, list(items))

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)
        if self.file:
            self.file.close()

    def out_of_time(self) -> bool:
        return time.monotonic() - self.began > self.args.seconds

    def run_place(self, place: Place, items: list) -> None:
        width = place.layout(items[0][2]).s_width
        num_in, outs = place.features
        size = 2 * place.num_tokens * min(num_in, sum(outs))
        copies = 2 if self.device == "cpu" else max(3, min(12, math.ceil(2.5e8 / size)))
        torch.manual_seed(stable(place))
        layers = [Layer(place, width, self.device, real=True) for _ in range(copies)]
        known: dict = {}
        all_blocks: dict = {}
        for _, kernel, candidate, tile in items:
            if self.out_of_time():
                return
            layout = place.layout(candidate)
            if layout not in all_blocks:
                all_blocks[layout] = Blocks.new(layout, self.device)
                all_blocks[layout].copy(place.segments)
            self.run_one(place, kernel, candidate, tile, layers, all_blocks[layout], known)

    def run_one(self, place, kernel, candidate, tile, layers, blocks, known) -> None:
        row = {
            **self.facts,
            "model": place.model,
            "tokens": place.num_tokens,
            "jobs": place.jobs,
            "zero_gradients": place.zero,
            "uneven": place.uneven,
            "group": place.group,
            "kernel": kernel,
            "setting": candidate.name + (f", parts of {tile}" if kernel == "sum" else ""),
            "tuning": dataclasses.asdict(candidate.tuning),
            "chunk": blocks.layout.tiles.chunk_tokens,
            "expand_tokens": blocks.layout.tiles.expand_tokens,
            "stack": blocks.layout.tiles.stack_rank,
        }
        error = self.compile_error(self.key(place, kernel, candidate, tile))
        try:
            if error:
                raise RuntimeError(error)
            parts = [part_of(layer, tile) if tile else None for layer in layers]
            if kernel == "sum":
                for part in parts:
                    part.normal_()
            worst, twin, ok = check(kernel, layers[0], blocks, candidate, parts[0], known, place)
            row |= {"error": worst, "twin": twin, "ok": ok, **resources()}
            steps = [
                lambda layer=layer, part=part: launch(kernel, layer, blocks, candidate, part)
                for layer, part in zip(layers, parts, strict=True)
            ]
            us = time_us(steps, self.args.rounds, self.device)
            tiles = 0 if parts[0] is None else parts[0].shape[0]
            size, floor = floor_us(kernel, place, tiles)
            row |= {"us": round(us, 2), "gb_s": round(size / us / 1e3), "floor_us": round(floor, 2)}
            row |= {"x_floor": round(us / floor, 2)}
        except Exception as problem:
            message = str(problem).strip().splitlines() or [""]
            row |= {"failed": f"{type(problem).__name__}: {message[0][:200]}"}
            if "CUDA error" in row["failed"] or "illegal" in row["failed"]:
                self.keep(row)
                raise
        self.keep(row)

    def keep(self, row: dict) -> None:
        self.rows.append(row)
        if self.file:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()

    def tables(self) -> None:
        for kernel in self.args.kernels:
            rows = [r for r in self.rows if r["kernel"] == kernel]
            if rows:
                self.table(kernel, rows)
        self.choice()
        bad = [r for r in self.rows if not r.get("ok")]
        print(f"\n{len(self.rows)} rows, {len(bad)} failed or wrong", *(
            f"\n  {r['model']} {r['tokens']} {r['group']} {r['kernel']} {r['setting']}: "
            + r.get("failed", f"error {r.get('error')}, twin {r.get('twin')}") for r in bad
        ))  # fmt: skip
        print(f"{time.monotonic() - self.began:.0f} s")

    def table(self, kernel: str, rows: list[dict]) -> None:
        """Per setting: each group's us, GB/s and times its floor; ms of a step; registers."""
        print(f"\n{kernel}: us (GB/s, x floor) of a launch; ms of a step, all layers")
        for model, num_tokens in itertools.product(self.args.models, self.args.tokens):
            chosen = [r for r in rows if (r["model"], r["tokens"]) == (model, num_tokens)]
            if not chosen:
                continue
            groups = self.groups(model)
            print(
                f"{model} {num_tokens}: "
                + " | ".join(groups)
                + " | ms of a step | regs, spills, KB"
            )
            by_setting = defaultdict(dict)
            for r in chosen:
                by_setting[r["setting"]][r["group"]] = r
            for setting, found in by_setting.items():
                cells = [self.cell(found.get(group)) for group in groups]
                good = [found[g]["us"] for g in groups if "us" in found.get(g, {})]
                total = (
                    f"{sum(good) * LAYERS[model] / 1e3:7.2f}" if len(good) == len(groups) else "-"
                )
                last = max(found.values(), key=lambda r: r.get("registers") or 0)
                shared = (last.get("shared") or 0) // 1024
                print(
                    f"  {setting:38}", *cells, f"{total:>8}",
                    f"  {last.get('registers')} {last.get('spills')} {shared}",
                )  # fmt: skip
            floor = sum({r["group"]: r.get("floor_us", 0) for r in chosen}.values())
            print(f"  {'floor (last setting)':38} {floor * LAYERS[model] / 1e3:.2f} ms")

    def totals(self) -> dict:
        """ms of a step by model, tokens, kernel and setting, where every group was measured."""
        found = defaultdict(dict)
        for r in self.rows:
            if "us" in r and r["ok"]:
                key = r["model"], r["tokens"], r["kernel"], r["setting"]
                found[key][r["group"]] = r["us"], r["tuning"]["features"]
        return {
            key: (sum(us for us, _ in groups.values()) * LAYERS[key[0]] / 1e3, features)
            for key, groups in found.items()
            if len(groups) == len(self.groups(key[0]))
            for features in [next(iter(groups.values()))[1]]
        }

    def choice(self) -> None:
        """The best of each kernel beside what settings.py says; reduce_b and its sum are one."""
        totals = self.totals()
        print("\nms of a step: settings.py (*), best, and which")
        for model, num_tokens in itertools.product(self.args.models, self.args.tokens):
            usual_sum = best_sum = 0.0
            for kernel in self.args.kernels:
                mine = {
                    setting: (ms, features)
                    for (*place, setting), (ms, features) in totals.items()
                    if place == [model, num_tokens, kernel]
                }
                if kernel == "sum" or not mine:
                    continue
                if kernel == "reduce_b":
                    mine = dict(self.with_sums(mine, totals, model, num_tokens))
                costs = {setting: ms for setting, (ms, _) in mine.items()}
                best = min(costs, key=costs.__getitem__)
                usual = next((ms for name, ms in costs.items() if name.endswith("*")), math.nan)
                usual_sum, best_sum = usual_sum + usual, best_sum + costs[best]
                print(f"  {model} {num_tokens} {kernel:10} {usual:7.2f} {costs[best]:7.2f}  {best}")
            if best_sum:
                print(f"  {model} {num_tokens} together   {usual_sum:7.2f} {best_sum:7.2f}")

    @staticmethod
    def with_sums(mine: dict, totals: dict, model: str, num_tokens: int):
        for setting, (ms, features) in mine.items():
            sums = [
                cost
                for (*place, name), (cost, _) in totals.items()
                if place == [model, num_tokens, "sum"] and name.endswith(f"parts of {features}")
            ]
            yield setting, (ms + min(sums, default=0.0), features)

    @staticmethod
    def cell(row: dict | None) -> str:
        if row is None or "us" not in row:
            return f"{'failed' if row else '-':>22}"
        mark = " " if row["ok"] else "!"
        return f"{row['us']:8.1f}{mark}({row['gb_s']:4} {row['x_floor']:4.1f}x)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["8b", "1b"], choices=MODELS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--groups", nargs="+", help="of linears; all, if not given")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--zero", action="store_true", help="gradients are zero and not read")
    parser.add_argument("--uneven", action="store_true", help="jobs of unequal length")
    parser.add_argument("--settings", nargs="+", help="those that begin so, beside the usual one")
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=85, help="start no row after so many")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--json", help="append one line per row here")
    parser.add_argument("--dry", action="store_true", help="tiny shapes in Triton's interpreter")
    args = parser.parse_args()
    if args.dry:
        args.models, args.tokens = ["dry"], [96]
    elif not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, or --dry and TRITON_INTERPRET=1")
    torch.backends.cuda.matmul.allow_tf32 = False
    if not args.dry:
        _remember_compiled()
        print(versions())
    bench = Bench(args)
    try:
        bench.run()
    finally:
        bench.tables()
        bench.close()


if __name__ == "__main__":
    main()
