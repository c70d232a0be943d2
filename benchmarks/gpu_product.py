"""What the adapters' update costs inside the backbone product, beside cuBLAS, on one GPU.

    python benchmarks/gpu_product.py --json product.jsonl            # the 8B layer, all of it
    python benchmarks/gpu_product.py --only "o forward" --seconds 30

The products of an 8B layer over 8,192 tokens in bf16, forward (Y = X W^T) and backward (dX = dY W):
by cuBLAS, by kernels of our own, and by those with the update inside (`product_kernels.py`), where
no other kernel writes Y or dX. S and the adapters lie behind the columns of X and W, or apart.

Predicted: `expand` of Y and of dX takes 383 us of an 8B layer (8 jobs of rank 8-64; 32 jobs: 442)
and a frozen product that adds to what it wrote some 100 us more; steps of 64 rank columns are
1.2 % of the products' 10.2 ms, 120 us, with one job in a tile and 240 with two. So products of our
own pay within 3.6 to 4.1 % of cuBLAS, or 2.4 to 3.0 % where every tile has two jobs.

Every setting is first tried on small products in a process of its own, all side by side: one that
does not compile, spills, is wrong or never ends is named and left out. The rest are timed, then the
two fastest of each product with the update inside, checked against float32 there. Tables first,
then one JSON line.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from product_kernels import SETTINGS, SLOTS, STEP, Apart, Setting, Sizes, step_of

LIMIT = 1e-2
"""Of a relative error; bf16 rounds to 2e-3."""
RANKS = (8, 64, 16, 32)
PAGES = 32
TODAY_US = {"8 jobs": 383, "32 jobs": 442}
"""`expand_y` and `expand_dx` of an 8B layer, ranks 8-64 (the kernels' README)."""
CASES = (*TODAY_US, "2 in each tile")
APART = ", apart"
"""S and the pages in buffers of their own."""
BEST = 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's numbers have no bfloat16.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16


@dataclass(frozen=True)
class Product:
    """X [tokens, depth] times W: [width, depth] forward, [depth, width] backward."""

    name: str
    num_in: int
    outs: tuple[int, ...]
    backward: bool
    tokens: int = 8192

    @property
    def depth(self) -> int:
        return sum(self.outs) if self.backward else self.num_in

    @property
    def width(self) -> int:
        return self.num_in if self.backward else sum(self.outs)

    @property
    def sizes(self) -> Sizes:
        ends = (self.columns(0).stop, self.columns(1).stop)
        return Sizes(self.depth, self.backward, ends, self.run)

    @property
    def run(self) -> int:
        """Pages of a job: backward adds up the linears, forward each has its own columns."""
        return len(self.outs) if self.backward else 1

    def columns(self, linear: int) -> slice:
        """Those of the result that this linear's rank columns add to."""
        if self.backward:
            return slice(0, self.width)
        return slice(sum(self.outs[:linear]), sum(self.outs[: linear + 1]))


PRODUCTS = [
    Product(f"{name} {'backward' if backward else 'forward'}", num_in, outs, backward)
    for name, num_in, outs in (
        ("qkv", 4096, (4096, 1024, 1024)),
        ("o", 4096, (4096,)),
        ("gate_up", 4096, (14336, 14336)),
        ("down", 14336, (4096,)),
    )
    for backward in (False, True)
]


class Span(NamedTuple):
    """The tokens of a job."""

    start: int
    stop: int
    page: int

    @property
    def rank(self) -> int:
        return RANKS[self.page % len(RANKS)]


def cut(tokens: int, length: int, first: int) -> list[Span]:
    edges = [0, *range(first, tokens, length), tokens]
    return [Span(*edge, i % PAGES) for i, edge in enumerate(itertools.pairwise(edges))]


def spans_of(case: str, tokens: int, rows: int) -> list[Span]:
    if case not in TODAY_US:
        return cut(tokens, rows, rows // 2)
    length = tokens // int(case.split()[0])
    return cut(tokens, length, length)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


class Inputs:
    """Of a product. The update is as large as the frozen result; both are random, since zeros draw
    less power."""

    def __init__(self, product: Product):
        self.product = p = product
        self.x = randn(p.tokens, p.depth)
        shape = (p.depth, p.width) if p.backward else (p.width, p.depth)
        self.w = randn(*shape) * p.depth**-0.5
        self.y = torch.empty(p.tokens, p.width, device=DEVICE, dtype=DTYPE)
        self.s = randn(p.tokens, len(p.outs), STEP)
        self.pages = randn(PAGES, p.run, STEP, p.width)
        for page in range(PAGES):
            rank = Span(0, 0, page).rank
            self.pages[page] *= (rank * p.run) ** -0.5
            self.pages[page, :, rank:] = 0
        pages = self.pages.flatten(0, 2)
        if p.backward:
            # One buffer serves both directions: its rows are longer than this one needs.
            whole = torch.cat([self.w, pages])
            self.wide_w = torch.nn.functional.pad(whole, (0, PAGES * STEP))[:, : p.width]
        else:
            self.wide_w = torch.cat([self.w, pages.T], 1)

    def cublas(self, *, adding: bool) -> Callable:
        w = self.w if self.product.backward else self.w.T
        if adding:
            return lambda: self.y.addmm_(self.x, w)
        return lambda: torch.mm(self.x, w, out=self.y)

    def ours(self, setting: Setting) -> Callable:
        return step_of(setting, self.product.sizes, self.x, self.w, self.y)

    def fused(self, setting: Setting, spans: list[Span], *, apart: bool = False) -> Callable:
        p = self.product
        # Pages behind the columns of W begin with its last step.
        first = 0 if apart else p.depth // STEP
        slots = (SLOTS, len(p.outs)) if p.backward else (len(p.outs), SLOTS)
        more = torch.zeros(p.tokens, *slots, STEP, device=DEVICE, dtype=DTYPE)
        rows = []
        for block in range(0, p.tokens, setting.rows):
            end = block + setting.rows
            jobs = [span for span in spans if span.start < end and span.stop > block]
            for slot, span in enumerate(jobs):
                here = slice(max(span.start, block), min(span.stop, end))
                target = more[here, slot] if p.backward else more[here, :, slot]
                target[..., : span.rank] = self.s[here, :, : span.rank]
            starts = [first + span.page * p.run for span in jobs]
            rows.append([len(jobs), *starts, *starts[:1] * (SLOTS - len(jobs))])
        table = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
        most = max(row[0] for row in rows)
        if apart:
            buffers = Apart(as_rows_of(self.x, more.flatten(1)), self.pages_apart())
            return step_of(setting, p.sizes, self.x, self.w, self.y, table, most, buffers)
        x = torch.cat([self.x, more.flatten(1)], 1)
        return step_of(setting, p.sizes, x, self.wide_w, self.y, table, most)

    def pages_apart(self) -> torch.Tensor:
        """A as a pool has it; B turned, in rows as long as those of W."""
        pages = self.pages.flatten(0, 2)
        return pages if self.product.backward else as_rows_of(self.w, pages.T[:, : self.w.shape[1]])

    def expected(self) -> torch.Tensor:
        w = self.w.float()
        return self.x.float() @ (w if self.product.backward else w.T)

    def update(self, spans: list[Span]) -> torch.Tensor:
        """What the adapters add, job by job."""
        y = torch.zeros(self.y.shape, device=DEVICE)
        for span in spans:
            here = slice(span.start, span.stop)
            for linear in range(len(self.product.outs)):
                columns = self.product.columns(linear)
                page = self.pages[span.page, linear if self.product.backward else 0]
                y[here, columns] += self.s[here, linear].float() @ page[:, columns].float()
        return y

    def errors(self, step: Callable, frozen: torch.Tensor, update: torch.Tensor) -> dict:
        """The error, and that of a twin whose update is 3 % off, which must be refused."""
        self.y.fill_(float("nan"))
        step()
        error, twin = (relative(self.y, frozen + scale * update) for scale in (1, 1.03))
        return {"error": error, "twin": twin, "ok": error < LIMIT < twin}


def as_rows_of(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values` in the first columns of rows as long as another's."""
    target = torch.zeros(len(values), like.shape[1], device=DEVICE, dtype=DTYPE)
    target[:, : values.shape[1]] = values
    return target


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.float() - expected).norm() / expected.norm())


def trial(name: str) -> dict:
    """A setting on small products, plain and with one job or two in a block of tokens."""
    setting = next(setting for setting in SETTINGS if str(setting) == name)
    torch.manual_seed(0)
    result: dict = {"ok": True}
    for backward in (False, True):
        product = Product("small", 256, (256, 512), backward, tokens=4 * setting.rows)
        inputs = Inputs(product)
        frozen = inputs.expected()
        spans = cut(product.tokens, 2 * setting.rows, setting.rows * 3 // 2)
        plain, fused = inputs.ours(setting), inputs.fused(setting, spans)
        apart, update = inputs.fused(setting, spans, apart=True), inputs.update(spans)
        found = inputs.errors(fused, frozen, update)
        found["apart"] = inputs.errors(apart, frozen, update)
        inputs.y.fill_(float("nan"))
        plain()
        found["plain"] = relative(inputs.y, frozen)
        result["backward" if backward else "forward"] = found
        result["ok"] &= found["ok"] and found["apart"]["ok"] and found["plain"] < LIMIT
        if DEVICE == "cuda":
            kernels = (plain(), fused(), apart())
            compiled = [(k.n_regs, k.n_spills, k.metadata.shared) for k in kernels]
            found["registers, spills, shared"] = compiled
            result["ok"] &= not any(spills for _, spills, _ in compiled)
    return result


def tried(setting: Setting) -> dict:
    """The same in a process of its own, so that one that fails or hangs takes none with it."""
    command = [sys.executable, __file__, "--trial", str(setting)]
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
            [times[key] for key in times if key[0] == p.name and key[1] in ways] for p in products
        ]
        return sum(min(each, default=float("nan")) for each in own)

    settings = set(map(str, SETTINGS))
    sums = {"cublas": total({"cublas"}), "cublas adding": total({"cublas adding"})}
    sums["ours"] = total(settings)
    for case, where in itertools.product(CASES, ("", APART)):
        sums[f"ours, {case}{where}"] = total({f"{setting}, {case}{where}" for setting in settings})
    if len(products) == len(PRODUCTS):
        sums |= {f"today, {case}": sums["cublas adding"] + us for case, us in TODAY_US.items()}
    return sums


def measure(products: list[Product], settings: list[Setting], seconds: float) -> dict:
    inputs = {p.name: Inputs(p) for p in products}
    frozen: Ways = {}
    for name, its in inputs.items():
        frozen[name, "cublas"] = its.cublas(adding=False)
        frozen |= {(name, str(setting)): its.ours(setting) for setting in settings}
    frozen_us = times_us(frozen, seconds / 2)
    show(frozen_us, products)
    steps: Ways = {}
    errors = {}
    for name, its in inputs.items():
        expected = its.expected()
        steps[name, "cublas"] = frozen[name, "cublas"]
        steps[name, "cublas adding"] = its.cublas(adding=True)
        for setting in sorted(settings, key=lambda s: frozen_us[name, str(s)])[:BEST]:
            steps[name, str(setting)] = frozen[name, str(setting)]
            for case, apart in itertools.product(CASES, (False, True)):
                spans = spans_of(case, its.product.tokens, setting.rows)
                step = its.fused(setting, spans, apart=apart)
                found = its.errors(step, expected, its.update(spans))
                way = f"{setting}, {case}{APART if apart else ''}"
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
        choices=list(map(str, SETTINGS)),
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
        print(f"{setting!s:24}", "ok" if result["ok"] else "LEFT OUT", result, flush=True)
    settings = [setting for setting in SETTINGS if trials[setting]["ok"]]
    if not settings:
        sys.exit("no setting works here")
    result = measure([p for p in PRODUCTS if p.name in args.only], settings, args.seconds)
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    line = json.dumps(
        {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": os.environ.get("TLORA_COMMIT", commit),
            "command": " ".join(sys.argv[1:]),
            "trials": {str(setting): result for setting, result in trials.items()},
            **result,
        }
    )
    print(line)
    if args.json:
        with open(args.json, "a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
