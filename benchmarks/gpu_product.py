"""What the adapters' update costs inside the backbone product, beside cuBLAS, on one GPU.

    python benchmarks/gpu_product.py --json product.jsonl            # the 8B layer, all of it
    python benchmarks/gpu_product.py --only "q, o forward" --seconds 30

The products of an 8B layer over 8,192 tokens in bf16, forward (Y = X W^T) and backward (dX = dY W):
by cuBLAS, by the kernel of `multi_lora/triton_product.py`, and by that with the update inside, so
that no other kernel writes Y or dX. `gpu_linears.py --how write inside` times it in a layer.

Every setting is first tried on small products in a process of its own, all side by side: one that
does not compile, spills, is wrong or never ends is named and left out. The rest are timed, then the
two fastest of each product with the update inside, checked against float32 there. Tables first,
then one JSON line.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import triton

from tlora.kernels.multi_lora.blocks import Blocks, Layout
from tlora.kernels.multi_lora.pages import BLOCK, PAGE
from tlora.kernels.multi_lora.settings import PRODUCT, Tuning
from tlora.kernels.multi_lora.tables import Segment
from tlora.kernels.multi_lora.triton_pages import lay, new_slots, sum_into_slots
from tlora.kernels.multi_lora.triton_product import Update, product
from tlora.runtime.benchmark.record import commit

SETTINGS = {
    "128x256 s3": PRODUCT,
    "128x128 s4": Tuning(tokens=128, features=128, warps=4, stages=4, programs=1),
    "128x128 s5": Tuning(tokens=128, features=128, warps=8, stages=5, programs=1),
    "128x256 s2": Tuning(tokens=128, features=256, warps=8, stages=2, programs=1),
}
"""What compiles for sm_90 without spills in 227 KB."""

LIMIT = 1e-2
"""Of a relative error; bf16 rounds to 2e-3."""
RANKS = (8, 64, 16, 32)
CASES = ("8 jobs", "32 jobs", "32 unequal jobs")
BEST = 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's numbers have no bfloat16.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16


@dataclass(frozen=True)
class Product:
    """X [tokens, depth] times W, which lies as [width, depth] forward and as [depth, width]
    backward."""

    name: str
    depth: int
    width: int
    backward: bool
    count: int = 1
    """In a layer."""
    tokens: int = 8192


PRODUCTS = [
    product
    for name, num_in, num_out, count in (
        ("q, o", 4096, 4096, 2),
        ("k, v", 4096, 1024, 2),
        ("gate, up", 4096, 14336, 2),
        ("down", 14336, 4096, 1),
    )
    for product in (
        Product(f"{name} forward", num_in, num_out, False, count),
        Product(f"{name} backward", num_out, num_in, True, count),
    )
]


def segments_of(case: str, tokens: int) -> list[Segment]:
    """Jobs of equal length, or from half to one and a half of that."""
    jobs = int(case.split()[0])
    unequal = "unequal" in case
    weights = [1 + (7 * i % 5 - 2) / 4 if unequal else 1.0 for i in range(jobs)]
    edges = [0, *itertools.accumulate(weights)]
    edges = [round(edge / edges[-1] * tokens) for edge in edges]
    spans = itertools.pairwise(edges)
    ranks = [RANKS[i % len(RANKS)] for i in range(jobs)]
    rows = itertools.accumulate(ranks, initial=0)
    return [
        Segment(start, stop, row, (rank,), (row,), scale=1.0)
        for (start, stop), row, rank in zip(spans, rows, ranks, strict=False)
    ]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


class Inputs:
    """Of a product. The update is as large as the frozen result; both are random, since zeros draw
    less power."""

    def __init__(self, product: Product):
        self.product = p = product
        self.x, self.s = randn(p.tokens, p.depth), randn(p.tokens, PAGE)
        self.w = randn(p.depth, p.width) * p.depth**-0.5
        self.laid = self.w if p.backward else self.w.T.contiguous()
        self.y = torch.empty(p.tokens, p.width, device=DEVICE, dtype=DTYPE)
        self.rows = randn(32 // len(RANKS) * sum(RANKS), p.width) * sum(RANKS) ** -0.5

    def cublas(self, *, adding: bool) -> Callable:
        w = self.laid if self.product.backward else self.laid.T
        if adding:
            return lambda: self.y.addmm_(self.x, w)
        return lambda: torch.mm(self.x, w, out=self.y)

    def ours(self, setting: str, update: Update | None = None) -> Callable:
        options = {"by_feature": not self.product.backward, "tuning": SETTINGS[setting]}
        return lambda: product([self.y], [self.x], [self.laid], update=update, **options)

    def fused(self, setting: str, segments: list[Segment]) -> Callable:
        """Without what lays S and B, which takes some microseconds."""
        p = self.product
        layout = Layout(
            num_tokens=p.tokens,
            in_features=p.width if p.backward else p.depth,
            out_features=(p.depth if p.backward else p.width,),
            max_segments=64,
            max_rank=max(RANKS),
            dropout=False,
            inside=("backward",) if p.backward else ("forward",),
        )
        blocks = Blocks.new(layout, DEVICE)
        blocks.copy(segments)
        if p.backward:
            slots = new_slots(self.s)
            # In one part.
            sum_into_slots(
                torch.empty_like(self.s), slots, self.s[None], [p.depth], p.depth, blocks,
                tokens=8, parts=1,
            )  # fmt: skip
            return self.ours(setting, Update(slots, [self.rows], blocks, "backward"))
        slots, turned = lay(self.s, [self.rows], blocks)
        return self.ours(setting, Update(slots, turned, blocks, "forward"))

    def expected(self) -> torch.Tensor:
        return self.x.float() @ self.w.float()

    def update(self, segments: list[Segment]) -> torch.Tensor:
        """What the adapters add, job by job."""
        y = torch.zeros(self.y.shape, device=DEVICE)
        for each in segments:
            here, (rank,) = slice(each.start, each.stop), each.ranks
            rows = self.rows[each.a_row : each.a_row + rank]
            y[here] += self.s[here, :rank].float() @ rows.float()
        return y

    def errors(self, step: Callable, frozen: torch.Tensor, update: torch.Tensor) -> dict:
        """The error, and that of a twin whose update is off, which must be refused."""
        self.y.fill_(float("nan"))
        step()
        error, twin = (relative(self.y, frozen + scale * update) for scale in (1, 1.05))
        return {"error": error, "twin": twin, "ok": error < LIMIT < twin}


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.float() - expected).norm() / expected.norm())


def trial(setting: str) -> dict:
    """A setting on small products, plain and with one job or more in a block of tokens."""
    torch.manual_seed(0)
    result: dict = {"ok": True}
    for backward in (False, True):
        product = Product("small", 256, 512, backward, tokens=8 * BLOCK)
        inputs, segments = Inputs(product), segments_of("8 unequal jobs", product.tokens)
        frozen = inputs.expected()
        plain, fused = inputs.ours(setting), inputs.fused(setting, segments)
        found = inputs.errors(fused, frozen, inputs.update(segments))
        inputs.y.fill_(float("nan"))
        plain()
        found["plain"] = relative(inputs.y, frozen)
        result["backward" if backward else "forward"] = found
        result["ok"] &= found["ok"] and found["plain"] < LIMIT
        if DEVICE == "cuda":
            compiled = [(k.n_regs, k.n_spills, k.metadata.shared) for k in (plain(), fused())]
            found["registers, spills, shared"] = compiled
            result["ok"] &= not any(spills for _, spills, _ in compiled)
    return result


def tried(setting: str) -> dict:
    """The same in a process of its own, so that one that fails or hangs takes none with it."""
    command = [sys.executable, __file__, "--trial", setting]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return {"ok": False, "why": "did not end in 120 s"}
    if run.returncode:
        return {"ok": False, "why": (run.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    return json.loads(run.stdout.splitlines()[-1])


def graph_of(step: Callable) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of at least 5 ms, and how often the step is in it."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (start, stop):
        step()
        event.record()
    stop.synchronize()
    repeats = int(5 / start.elapsed_time(stop)) + 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            step()
    return graph, repeats


Ways = dict[tuple[str, str], Callable]
Times = dict[tuple[str, str], float]


def times_us(steps: Ways, seconds: float) -> Times:
    """Medians. Each sample comes behind its own like, every other round goes backwards: the clock
    depends on the power of the last milliseconds."""
    graphs = {key: graph_of(step) for key, step in steps.items()}
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    end, rounds = time.monotonic() + seconds, 0
    while rounds < 2 or time.monotonic() < end:
        for key in list(graphs)[:: -1 if rounds % 2 else 1]:
            graph, repeats = graphs[key]
            graph.replay()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            samples[key].append(start.elapsed_time(stop) * 1e3 / repeats)
        rounds += 1
    print(f"{rounds} rounds", flush=True)
    return {key: statistics.median(values) for key, values in samples.items()}


def show(times: Times, products: list[Product]) -> None:
    print(f"{'product':18} {'way':40} {'us':>8} {'TFLOP/s':>8} {'of cuBLAS':>10}")
    work = {p.name: 2 * p.tokens * p.depth * p.width for p in products}
    for (name, way), us in times.items():
        part = times[name, "cublas"] / us
        print(f"{name:18} {way:40} {us:8.1f} {work[name] / us / 1e6:8.0f} {part:10.1%}", flush=True)


def layer_us(times: Times, products: list[Product]) -> dict[str, float]:
    """All products together: cuBLAS, our fastest of each, the fastest with the update inside."""

    def total(ways: set[str]) -> float:
        own = [
            (p.count, [times[key] for key in times if key[0] == p.name and key[1] in ways])
            for p in products
        ]
        return sum(count * min(each, default=float("nan")) for count, each in own)

    settings = set(SETTINGS)
    sums = {"cublas": total({"cublas"}), "cublas adding": total({"cublas adding"})}
    sums["ours"] = total(settings)
    for case in CASES:
        sums[f"ours, {case}"] = total({f"{setting}, {case}" for setting in settings})
    return sums


def measure(products: list[Product], settings: list[str], seconds: float) -> dict:
    inputs = {p.name: Inputs(p) for p in products}
    frozen: Ways = {}
    for name, its in inputs.items():
        frozen[name, "cublas"] = its.cublas(adding=False)
        frozen |= {(name, setting): its.ours(setting) for setting in settings}
    frozen_us = times_us(frozen, seconds / 2)
    show(frozen_us, products)
    steps: Ways = {}
    errors = {}
    for name, its in inputs.items():
        expected = its.expected()
        steps[name, "cublas"] = frozen[name, "cublas"]
        steps[name, "cublas adding"] = its.cublas(adding=True)
        for setting in sorted(settings, key=lambda s: frozen_us[name, s])[:BEST]:
            steps[name, setting] = frozen[name, setting]
            for case in CASES:
                segments = segments_of(case, its.product.tokens)
                step = its.fused(setting, segments)
                found = its.errors(step, expected, its.update(segments))
                way = f"{setting}, {case}"
                errors[f"{name}, {way}"] = found
                if found["ok"]:
                    steps[name, way] = step
                else:
                    print("WRONG", name, way, found)
    print(f"checked {len(errors)}: worst {max(e['error'] for e in errors.values()):.2e}")
    fused_us = times_us(steps, seconds / 2)
    show(fused_us, products)
    layer = layer_us(fused_us, products)
    print("all products:", *(f"{way} {us:.0f} us |" for way, us in layer.items()))
    return {
        "frozen_us": {", ".join(key): round(us, 1) for key, us in frozen_us.items()},
        "us": {", ".join(key): round(us, 1) for key, us in fused_us.items()},
        "layer_us": {way: round(us, 1) for way, us in layer.items()},
        "errors": errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=90, help="of timing")
    names = [p.name for p in PRODUCTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PRODUCT")
    parser.add_argument("--json", help="append the line here")
    parser.add_argument(
        "--trial",
        choices=SETTINGS,
        metavar="SETTING",
        help="on small products, once",
    )
    args = parser.parse_args()
    if args.trial:
        print(json.dumps(trial(args.trial)))
        return
    if DEVICE != "cuda":
        sys.exit("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    with ThreadPoolExecutor(12) as pool:
        trials = dict(zip(SETTINGS, pool.map(tried, SETTINGS), strict=True))
    for setting, result in trials.items():
        print(f"{setting:12}", "ok" if result["ok"] else "LEFT OUT", result, flush=True)
    settings = [setting for setting in SETTINGS if trials[setting]["ok"]]
    if not settings:
        sys.exit("no setting works here")
    result = measure([p for p in PRODUCTS if p.name in args.only], settings, args.seconds)
    line = json.dumps(
        {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": commit(),
            "command": " ".join(sys.argv[1:]),
            "trials": trials,
            **result,
        }
    )
    print(line)
    if args.json:
        with open(args.json, "a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
