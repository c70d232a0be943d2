"""What the adapters cost on top of the frozen linears of one decoder layer, on one GPU.

    python benchmarks/gpu_linears.py --check --stages --layer      # all of it
    python benchmarks/gpu_linears.py --layer --tokens 8192 --adapters 8 32 --ranks mixed

--check compares every kernel with the float32 reference, on fresh inputs, outputs poisoned with
NaN, and shows that a scale off by 1 % is refused. --stages times each kernel beside its bytes.
--layer times forward and dX of the seven linears, frozen and with adapters, as replays of a
captured graph and, with --plain, without one; `by group` is the same from the groups timed one by
one; `--how inside` has the update inside of frozen products (inside_group.py). --composed takes
nano-batches as the engine makes them of so many jobs, not one with all of them. --warm first
compiles every kernel, in processes side by side. One JSON line per case, behind its table.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import triton
from inside_group import WAYS, InsideGroup
from layer_shapes import SHAPES
from linear_group import Case, Group

from tlora.kernels.multi_lora import reference
from tlora.kernels.multi_lora import triton_backward as backward
from tlora.kernels.multi_lora import triton_forward as forward
from tlora.kernels.multi_lora.tables import Segment
from tlora.kernels.streams import threshold
from tlora.runtime.benchmark.record import commit


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Not NaN where values are: the largest of several errors would hide it."""
    error = (value.float() - expected).norm() / expected.norm()
    return float(error) if bool(torch.isfinite(value).all()) else float("inf")


def check_case(case: Case, features: tuple, limit: float = 5e-3) -> dict:
    """Worst relative error over outputs and gradients, and that of a twin with a scale 1 % off."""
    group = Group(case, features)
    for tensor in (*group.y, group.dx, group.s):
        tensor.fill_(float("nan"))
    group.forward("delta")
    group.backward("delta")
    first = [t.clone() for t in (*group.y, group.dx, group.grad_a, *group.grad_b)]

    def expected(segments):
        y = reference.forward(group.x, group.a, group.b, segments, group.rows, group.linears)
        grads = reference.backward(
            group.x, group.dy, group.a, group.b, segments, group.rows, group.linears
        )
        return [*y, grads.x, grads.a, *grads.b]

    errors = [relative(v, e) for v, e in zip(first, expected(group.segments), strict=True)]
    off = [Segment(**{**_fields(s), "scale": s.scale * 1.01}) for s in group.segments]
    twin = [relative(v, e) for v, e in zip(first, expected(off), strict=True)]
    for tensor in (group.grad_a, *group.grad_b):
        tensor.zero_()
    group.forward("delta")
    group.backward("delta")
    second = [*group.y, group.dx, group.grad_a, *group.grad_b]
    same = all(torch.equal(u, v) for u, v in zip(first, second, strict=True))
    # One by one: a NaN is neither the largest nor the smallest.
    ok = same and all(e < limit < t for e, t in zip(errors, twin, strict=True))
    result = {"worst": max(errors), "twin": min(twin), "same_bits": same, "ok": ok}
    if not ok:
        print(
            "FAILED", case, features, [f"{e:.2e}" for e in errors], [f"{e:.2e}" for e in twin], same
        )
    return result


def _fields(segment: Segment) -> dict:
    return {name: getattr(segment, name) for name in Segment.__slots__}


def check_neighbours(features: tuple) -> bool:
    """Whether a job's outputs and gradients keep their bits among others and at another place."""
    num_in, outs = features
    n, tokens, mine = len(outs), 2048, 700
    results = []
    x = torch.randn(mine, num_in, device="cuda", dtype=torch.bfloat16)
    dy = [torch.randn(mine, o, device="cuda", dtype=torch.bfloat16) for o in outs]
    pools = [
        torch.randn(24 * n, num_in, device="cuda"),
        *(torch.randn(24, o, device="cuda") for o in outs),
    ]
    for place, other_ranks in ((0, (8, 64)), (640, (16, 3)), (1348, (64, 64))):
        group = Group(Case(tokens, 3, "64", 0.05), features)
        spans = {
            0: [(700, 1400), (1400, 2048)],
            640: [(0, 640), (1340, 2048)],
            1348: [(0, 1000), (1000, 1348)],
        }[place]
        common = {"threshold": threshold(0.05), "scale": 0.7}
        segments = [
            Segment(place, place + mine, 0, (24,) * n, (0,) * n, key=9, **common),
            *(
                Segment(
                    *span, 24 * n + 64 * n * i, (r,) * n, (24 + 64 * i,) * n, key=77 + i, **common
                )
                for i, (span, r) in enumerate(zip(spans, other_ranks, strict=True))
            ),
        ]
        segments.sort(key=lambda s: s.start)
        group.blocks.copy(segments)
        group.a[: 24 * n] = pools[0]
        for b, pool in zip(group.b, pools[1:], strict=True):
            b[:24] = pool
        span = slice(place, place + mine)
        group.x[span] = x
        group.rows[span] = torch.arange(mine, dtype=torch.int32, device="cuda")
        for target, source in zip(group.dy, dy, strict=True):
            target[span] = source
        group.forward("delta")
        group.backward("delta")
        results.append(
            [
                *(y[span].clone() for y in group.y),
                group.dx[span].clone(),
                group.grad_a[: 24 * n].clone(),
                *(g[:24].clone() for g in group.grad_b),
            ]
        )
    return all(
        torch.equal(u, v) for other in results[1:] for u, v in zip(results[0], other, strict=True)
    )


def graph_of(step, repeats: int = 1):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            step()
    return graph


def times_us(steps: dict, *, rounds: int = 15, inner: int = 2) -> dict[str, float]:
    """Median microseconds of each; rounds interleave them, so that drift hits all alike.

    The clock depends on the power of what ran before: each sample comes behind its own like, and
    every other round goes backwards. It has settled in samples of a third of a second.
    """
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    torch.cuda.synchronize()
    for i in range(rounds):
        for name, step in list(steps.items())[:: -1 if i % 2 else 1]:
            for _ in range(inner):
                step()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(inner):
                step()
            stop.record()
            stop.synchronize()
            samples[name].append(start.elapsed_time(stop) * 1e3 / inner)
    return {name: statistics.median(values) for name, values in samples.items()}


def stage_steps(group: Group, tunings: dict) -> dict:
    g = group
    n = len(g.outs)
    args = (g.blocks, g.rows, g.linears)
    return {
        "shrink_x": lambda: forward.shrink(
            g.s, [g.x] * n, [g.a_used] * n, *args, name="shrink_x", **tunings.get("shrink", {})
        ),
        "expand_y": lambda: forward.expand(
            g.y, g.s, g.b_used, *args, name="expand_y", write=True, **tunings.get("expand", {})
        ),
        "reduce_b": lambda: backward.reduce_fused(
            g.ds, g.grad_b, g.s, g.dy, g.b_used, *args, **tunings.get("reduce_b", {})
        ),
        "reduce_a": lambda: backward.reduce(
            [g.grad_a] * n, g.ds, [g.x] * n, *args, name="reduce_a",
            **tunings.get("reduce_a", {}),
        ),
        "expand_dx": lambda: forward.expand(
            [g.dx], g.ds, [g.a_used], *args, name="expand_dx", write=True,
            **tunings.get("expand", {}),
        ),
    }  # fmt: skip


def bench_us(step, repeats: int = 8) -> float:
    """Microseconds with a cold L2 and no launch gaps: a graph that also wipes it, less that."""
    wipe = torch.empty(2**26, dtype=torch.int32, device="cuda")

    def cold():
        wipe.zero_()
        step()

    step()
    graphs = {"cold": graph_of(cold, repeats), "wipe": graph_of(wipe.zero_, repeats)}
    times = times_us({k: g.replay for k, g in graphs.items()}, rounds=9, inner=1)
    return (times["cold"] - times["wipe"]) / repeats


def stages(case: Case, shape: str, shadow: bool) -> dict:
    result = {}
    for name, features in SHAPES[shape].items():
        group = Group(case, features, shadow=shadow)
        floors = group.floor_bytes()
        row = {}
        for stage, step in stage_steps(group, {}).items():
            step()
            us = bench_us(step)
            row[stage] = {"us": round(us, 1), "tb_s": round(floors[stage] / us / 1e6, 2)}
        result[name] = row
        print(
            f"{name:8}", *(f"{k} {v['us']:7.1f} us {v['tb_s']:.2f} TB/s |" for k, v in row.items())
        )
        del group
    for stage in row:
        print(f"  all groups, {stage}: {sum(result[g][stage]['us'] for g in result):.0f} us")
    return result


def new_group(case: Case, features: tuple, shadow: bool, hows: list[str]) -> Group:
    kind = InsideGroup if set(hows) & set(WAYS) else Group
    return kind(case, features, shadow=shadow)


def check_inside(name: str, group: Group, how: str = "inside", limit: float = 6e-3) -> None:
    """The update inside the product gives what adapters first do, but for roundings; frozen linears
    do not."""
    results = []
    for way in ("write", how, "frozen"):
        for tensor in (*group.y, group.dx):
            tensor.fill_(float("nan"))
        if way == "frozen":
            group.frozen_forward()
            group.frozen_backward()
        else:
            group.forward(way)
            group.backward(way)
        results.append([tensor.float() for tensor in (*group.y, group.dx)])
    for tensor in (group.grad_a, *group.grad_b):
        tensor.zero_()
    usual, found, twin = results
    errors = [relative(u, v) for u, v in zip(found, usual, strict=True)]
    twins = [relative(u, v) for u, v in zip(twin, usual, strict=True)]
    # Not the largest of them, which a NaN need not be.
    right = all(error < limit for error in errors) and all(twin > limit for twin in twins)
    if not right:
        raise AssertionError(f"{name}, {how}: errors {errors}, frozen {twins}")


def layer(
    case: Case, shape: str, shadow: bool, hows: list[str], plain: bool, timing: dict[str, int]
) -> dict:
    groups = {n: new_group(case, f, shadow, hows) for n, f in SHAPES[shape].items()}
    for how in set(hows) & set(WAYS):
        for name, group in groups.items():
            check_inside(name, group, how)

    def frozen():
        for g in groups.values():
            g.frozen_forward()
        for g in reversed(groups.values()):
            g.frozen_backward()

    def adapted(how):
        for g in groups.values():
            g.forward(how)
        for g in reversed(groups.values()):
            g.backward(how)

    steps = {"frozen": frozen}
    for how in hows:
        steps[how] = lambda how=how: adapted(how)
    for name, g in groups.items():
        steps[f"{name} frozen fwd"] = g.frozen_forward
        steps[f"{name} frozen bwd"] = g.frozen_backward
        for how in hows:
            steps[f"{name} {how} fwd"] = lambda g=g, how=how: g.forward(how)
            steps[f"{name} {how} bwd"] = lambda g=g, how=how: g.backward(how)
    graphs = {name: graph_of(step) for name, step in steps.items()}
    replayed = times_us({name: graph.replay for name, graph in graphs.items()}, **timing)
    result = {"graph_us": {k: round(v, 1) for k, v in replayed.items()}}
    base = replayed["frozen"]
    for how in hows:
        result[f"overhead_{how}"] = round(replayed[how] / base - 1, 4)
        result[f"overhead_{how}_by_group"] = round(by_group(replayed, how), 4)
    if plain:
        eager = times_us({k: steps[k] for k in ("frozen", *hows)}, rounds=7)
        result["plain_us"] = {k: round(v, 1) for k, v in eager.items()}
    floors = [g.floor_bytes() for g in groups.values()]
    total = sum(sum(f.values()) for f in floors)
    print(
        f"{shape} T={case.tokens} adapters={case.adapters} rank={case.ranks} p={case.dropout}"
        f" shadow={shadow}: frozen {base:.0f} us",
        *(
            f"| {how} +{100 * result[f'overhead_{how}']:.1f} %"
            f" (by group +{100 * result[f'overhead_{how}_by_group']:.1f} %)"
            for how in hows
        ),
        *(f"| plain {k} {v:.0f}" for k, v in result.get("plain_us", {}).items()),
        f"| floor at 4.3 TB/s +{100 * total / 4.3e6 / base:.1f} %",
    )
    for name in groups:
        print(
            f"   {name:8}",
            *(
                f"{d}: frozen {replayed[f'{name} frozen {d}']:.0f}"
                + "".join(f", {how} {replayed[f'{name} {how} {d}']:.0f}" for how in hows)
                + " us |"
                for d in ("fwd", "bwd")
            ),
        )
    return result


def by_group(times: dict[str, float], how: str) -> float:
    """The cost of the adapters over frozen linears, both as sums of groups that ran by
    themselves."""
    sums = {w: sum(us for name, us in times.items() if f" {w} " in name) for w in (how, "frozen")}
    return sums[how] / sums["frozen"] - 1


def workers() -> int:
    """Processes that compile side by side."""
    return max(2, (os.cpu_count() or 2) - 2)


def compile_group(case: Case, features: tuple, shadow: bool, hows: list[str]) -> None:
    """Run every kernel of a group once; what it compiles is kept on disk for others."""
    group = new_group(case, features, shadow, hows)
    for how in hows:
        group.forward(how)
        group.backward(how)
    torch.cuda.synchronize()


def warm(cases: list[Case], shape: str, shadow: bool, hows: list[str]) -> None:
    """One case of each that compiles something of its own, in processes side by side."""
    kinds = {(c.tokens, c.max_rank, c.dropout, max(32, c.adapters)): c for c in cases}
    with ProcessPoolExecutor(workers(), mp_context=get_context("spawn")) as pool:
        made = [
            pool.submit(compile_group, case, features, shadow, hows)
            for case in kinds.values()
            for features in SHAPES[shape].values()
        ]
        for each in made:
            each.result()


def keep(lines: list[dict], args: argparse.Namespace) -> None:
    """As soon as they are known: the device may be gone before the next case is measured."""
    if not lines:
        return
    line = json.dumps(
        {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": commit(),
            "command": " ".join(sys.argv[1:]),
            "shape": args.shape,
            "results": lines,
        }
    )
    if args.json:
        with open(args.json, "a") as file:
            file.write(line + "\n")
    else:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--ranks", nargs="+", default=["16", "64", "mixed"])
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.05])
    parser.add_argument(
        "--how", nargs="+", default=["add", "write"], choices=["add", "write", *WAYS]
    )
    parser.add_argument("--shadow", action="store_true", help="bf16 copies of the pools")
    parser.add_argument("--warm", action="store_true", help="compile first, side by side")
    parser.add_argument("--plain", action="store_true", help="time without graphs too")
    parser.add_argument(
        "--inner",
        type=int,
        default=2,
        help="with --layer: replays of a sample, behind as many that are not timed; 32 are the"
        " layers of an 8B step, long enough for the clock to settle",
    )
    parser.add_argument("--rounds", type=int, default=15, help="with --layer")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--layer", action="store_true")
    parser.add_argument(
        "--zero", action="store_true", help="gradients are marked as zero and not read"
    )
    parser.add_argument(
        "--composed",
        type=int,
        nargs="+",
        help="nano-batches of these numbers as the engine makes them of so many jobs",
    )
    parser.add_argument("--lengths", default="512", help="with --composed, as tlora bench takes it")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 2, 4], help="with --composed, in sequences"
    )
    parser.add_argument("--json", help="append the lines here instead of printing them")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False

    cases = [
        Case(*values, args.zero, number, args.lengths, tuple(args.batch))
        for *values, number in itertools.product(
            args.tokens, args.adapters, args.ranks, args.dropout, args.composed or [None]
        )
    ]
    if args.warm:
        warm(cases, args.shape, args.shadow, args.how)
    if args.check:
        lines = []
        odd = [Case(1000, 7, "5", 0.1), Case(777, 3, "256", 0.0), Case(2047, 100, "9", 0.05)]
        for case in [*odd, *cases]:
            for name, features in SHAPES[args.shape].items():
                result = check_case(case, features)
                lines.append({"what": "check", "group": name, "case": vars(case), **result})
        print(f"checked {len(lines)}: worst", max(r["worst"] for r in lines))
        for name, features in SHAPES[args.shape].items():
            print(f"same bits with other neighbours, {name}:", check_neighbours(features))
        keep(lines, args)
    for case in cases:
        lines = []
        if args.stages:
            result = stages(case, args.shape, args.shadow)
            lines.append({"what": "stages", "case": vars(case), "shadow": args.shadow, **result})
        if args.layer:
            timing = {"rounds": args.rounds, "inner": args.inner}
            result = layer(case, args.shape, args.shadow, args.how, args.plain, timing)
            lines.append({"what": "layer", "case": vars(case), "shadow": args.shadow, **result})
        keep(lines, args)


if __name__ == "__main__":
    main()
