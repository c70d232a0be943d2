"""How long each kernel takes where it stands in a layer, on one GPU.

    python benchmarks/gpu_in_layer.py --adapters 32 8 --how frozen write inside both
    python benchmarks/gpu_in_layer.py --how inside --ways "wide = reduce_b large: features=128"

Products draw all the power that the device may have, and the clock that they leave is a quarter
below that of a kernel which is timed by itself: one that is bound by what a multiprocessor does,
not by bytes, shows only here. A layer's graph is replayed under the profiler; what is said of a
kernel is the median over the replays. Cases and ways as in gpu_ways.py. One JSON line per case.
"""

import argparse
import collections
import itertools
import json
import re
import statistics
import sys
from typing import NamedTuple

import torch
import triton
from gpu_linears import graph_of
from gpu_ways import USUAL, Way, parse_way, warm
from inside_group import WAYS, InsideGroup
from layer_shapes import SHAPES
from linear_group import Case, Group
from torch.profiler import ProfilerActivity, profile

from tlora.runtime.benchmark.record import commit

BEFORE = 32
"""Replays until the clock has settled: a third of a second."""

REPLAYS = 24


class Span(NamedTuple):
    """A kernel that ran, in microseconds."""

    name: str
    start: float
    end: float


class Kernel(NamedTuple):
    """One of a layer's, in their order."""

    kind: str
    us: float


def in_order(spans: list[Span], replays: int) -> list[Kernel]:
    """The layer's kernels, each with its median. Raises if replays were not alike."""
    spans = sorted(spans, key=lambda span: span.start)
    number = len(spans) // replays
    names = [span.name for span in spans]
    if names != names[:number] * replays:
        raise ValueError(f"{len(spans)} kernels are not {replays} times the same")
    return [
        Kernel(
            kind_of(names[i]),
            statistics.median(span.end - span.start for span in spans[i::number]),
        )
        for i in range(number)
    ]


def kind_of(name: str) -> str:
    """Ours by their names, products of the library as such."""
    if found := re.match(r"(\w+)_kernel", name):
        return found[1]
    return "other" if name.startswith("Mem") else "cublas"


def by_kind(kernels: list[Kernel]) -> dict[str, float]:
    """The most expensive first."""
    sums: collections.Counter[str] = collections.Counter()
    for kernel in kernels:
        sums[kernel.kind] += kernel.us
    return {kind: round(us, 1) for kind, us in sums.most_common()}


def run_layer(groups: dict[str, Group], how: str) -> None:
    for group in groups.values():
        group.frozen_forward() if how == "frozen" else group.forward(how)
    for group in reversed(groups.values()):
        group.frozen_backward() if how == "frozen" else group.backward(how)


def measure(groups: dict[str, Group], how: str, way: Way) -> list[Kernel]:
    with way.in_force():
        run_layer(groups, how)
        graph = graph_of(lambda: run_layer(groups, how))
    for _ in range(BEFORE):
        graph.replay()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    spans = [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type.name == "CUDA"
    ]
    return in_order(spans, REPLAYS)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--how", nargs="+", default=["frozen", "write", "inside"])
    parser.add_argument("--ways", nargs="+", type=parse_way, default=[])
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--adapters", type=int, nargs="+", default=[32, 8])
    parser.add_argument("--ranks", default="mixed")
    parser.add_argument("--zero", action="store_true", help="gradients are zero and not read")
    parser.add_argument("--json", help="append one line per case here")
    args = parser.parse_args()
    if wrong := set(args.how) - {"frozen", "add", "write", *WAYS}:
        parser.error(f"no way {', '.join(sorted(wrong))}")
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    ways = [USUAL, *args.ways]
    cases = [Case(args.tokens, adapters, args.ranks, 0.0, args.zero) for adapters in args.adapters]
    for how in set(args.how) - {"frozen"}:
        warm(cases, args.shape, ways, how)
    for case in cases:
        groups = {name: InsideGroup(case, f, shadow=True) for name, f in SHAPES[args.shape].items()}
        result = {}
        for how, way in itertools.product(args.how, ways):
            if how == "frozen" and way is not USUAL:
                continue
            kernels = measure(groups, how, way)
            sums = by_kind(kernels)
            result[f"{how}, {way.name}"] = {
                "us": round(sum(kernel.us for kernel in kernels), 1),
                "by_kind": sums,
                "in_order": [[kernel.kind, round(kernel.us, 1)] for kernel in kernels],
                "changes": way.changes,
            }
            print(
                f"{case.adapters} adapters, {how}, {way.name}: {sum(sums.values()):.0f} us:",
                ", ".join(f"{kind} {us:.0f}" for kind, us in sums.items()),
                flush=True,
            )
        line = {
            "kind": "gpu_in_layer",
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": commit(),
            "command": " ".join(sys.argv[1:]),
            "shape": args.shape,
            "case": vars(case),
            "ways": result,
        }
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
