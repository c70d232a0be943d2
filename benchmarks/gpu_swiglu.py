"""SwiGLU with the adapters of gate and up added on the way: right, and under which settings fast?

    python benchmarks/gpu_swiglu.py --check --settings --json swiglu.jsonl

--check compares h, the gradients of gate and up, dX, dA and dB of an 8B layer's gate and up in
bfloat16 with float32 sums, outputs poisoned with NaN, beside the same for adapters written first
(`write`); a scale off by 10 % must be refused; two runs and other neighbours must give the same
bits.
--settings times the two kernels alone, cold L2, beside the elementwise kernel without adapters.
"""

import argparse
import itertools
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import torch
import triton
from gpu_linears import SHAPES, Case, Group, bench_us, relative

from tlora.kernels.multi_lora import reference
from tlora.kernels.multi_lora.blocks import Tiles
from tlora.kernels.multi_lora.settings import Tuning

LIMIT = 8e-3
"""Relative error of bfloat16; a scale off by 10 % gives 1.1e-2 or more."""

# tokens, features, warps, stages, programs, registers
TRIED = [
    Tuning(tokens=t, features=f, warps=w, stages=s, programs=p, registers=r)
    for t, f, w, s, p, r in (
        (64, 64, 4, 2, 4, 0),
        (64, 64, 4, 2, 3, 0),
        (64, 64, 4, 1, 3, 0),
        (64, 64, 4, 2, 4, 128),
        (64, 64, 8, 2, 3, 0),
        (64, 64, 8, 1, 3, 0),
        (64, 128, 8, 2, 2, 0),
        (64, 128, 8, 1, 1, 0),
        (32, 64, 4, 1, 6, 0),
        (32, 64, 4, 2, 4, 0),
        (32, 128, 8, 2, 2, 0),
        (16, 128, 4, 2, 5, 0),
        (64, 32, 4, 2, 7, 0),
        (128, 64, 8, 2, 1, 0),
    )
]


def new_group(case: Case, *, shadow: bool = True) -> Group:
    tiles = Tiles.for_tokens(case.tokens)
    return Group(case, SHAPES["8b"]["gate_up"], tiles=tiles, shadow=shadow).use_swiglu()


def found_by(group: Group, how: str) -> dict[str, torch.Tensor]:
    """Everything that forward and backward give."""
    for tensor in (*group.y, *group.dy, group.h, group.dx, group.s):
        tensor.fill_(float("nan"))
    for grad in (group.grad_a, *group.grad_b):
        grad.zero_()
    group.forward(how)
    group.backward(how)
    named = {"h": group.h, "dgate": group.dy[0], "dup": group.dy[1], "dx": group.dx}
    named |= {"dA": group.grad_a, "dB gate": group.grad_b[0], "dB up": group.grad_b[1]}
    return {name: value.clone() for name, value in named.items()}


def expected(group: Group, segments) -> dict[str, torch.Tensor]:
    common = (group.a_used.float(), [b.float() for b in group.b_used])
    x = group.x.float()
    deltas = reference.forward(x, *common, segments, group.rows, group.linears)
    gate, up = (x @ w.float().T + d for w, d in zip(group.weights, deltas, strict=True))
    h, dgate, dup = reference.swiglu(gate, up, group.dh.float())
    grads = reference.backward(x, [dgate, dup], *common, segments, group.rows, group.linears)
    dx = grads.x + dgate @ group.weights[0].float() + dup @ group.weights[1].float()
    named = {"h": h, "dgate": dgate, "dup": dup, "dx": dx, "dA": grads.a}
    return named | {"dB gate": grads.b[0], "dB up": grads.b[1]}


def check(case: Case, *, shadow: bool) -> dict:
    group = new_group(case, shadow=shadow)
    right = expected(group, group.segments)
    off = expected(group, [replace(s, scale=1.1 * s.scale) for s in group.segments])
    found = found_by(group, "fold")
    again = found_by(group, "fold")
    written = found_by(group, "write")
    errors = {name: relative(value, right[name]) for name, value in found.items()}
    errors_write = {name: relative(value, right[name]) for name, value in written.items()}
    twin = {name: relative(value, off[name]) for name, value in found.items()}
    same = all(torch.equal(value, again[name]) for name, value in found.items())
    ok = max(errors.values()) < LIMIT and min(twin.values()) > LIMIT and same
    print(f"{'ok' if ok else 'FAILED'} {case} shadow={shadow} same bits twice: {same}")
    for label, values in (("fold", errors), ("write", errors_write), ("10 % off", twin)):
        print(f"   {label:8}", *(f"{name} {value:.2e}" for name, value in values.items()))
    return {"what": "check", "case": vars(case), "ok": ok, "fold": errors, "write": errors_write}


def check_neighbours() -> bool:
    """700 tokens of a job at two places, beside others: the same bits of h and its gradients."""
    results = []
    for place, others in ((0, 5), (1348, 2)):
        torch.manual_seed(place)
        group = new_group(Case(2048, others + 1, "mixed", 0.0))
        edges = torch.linspace(700, 2048, others + 1).int().tolist()
        spans = [(0, 700), *itertools.pairwise(edges)]
        if place:
            spans = [(start - 700, stop - 700) for start, stop in spans[1:]] + [(1348, 2048)]
        order = [*range(1, others + 1), 0] if place else range(others + 1)
        segments = [
            replace(group.segments[i], start=start, stop=stop)
            for i, (start, stop) in zip(order, spans, strict=True)
        ]
        group.blocks.copy(segments)
        torch.manual_seed(99)
        span = slice(place, place + 700)
        mine = group.segments[0]
        rank = mine.ranks[0]
        group.a_used[: 2 * rank].normal_()
        for tensor in (group.x, *group.y, group.dh):
            tensor[span] = torch.randn(700, tensor.shape[1], device="cuda")
        for b in group.b_used:
            b[:rank].normal_()
        group.shrink()
        group.folded_swiglu(backward=False)
        group.folded_swiglu(backward=True)
        results.append([t[span].clone() for t in (group.h, *group.dy)])
    return all(map(torch.equal, *results))


def compile_setting(case: Case, tuning: Tuning) -> None:
    group = new_group(case)
    for backward in (False, True):
        group.folded_swiglu(backward=backward, tuning=tuning)
    torch.cuda.synchronize()


def compile_case(case: Case, shadow: bool) -> None:
    group = new_group(case, shadow=shadow)
    for how in ("write", "fold"):
        group.forward(how)
        group.backward(how)
    torch.cuda.synchronize()


def time_settings(case: Case) -> list[dict]:
    group = new_group(case)
    group.shrink()
    group.frozen_forward()
    ways = (False, True)
    plain = [bench_us(lambda b=b: group.plain_swiglu(backward=b)) for b in ways]
    print(f"{case}: elementwise {plain[0]:.1f} us forward, {plain[1]:.1f} backward")
    lines = []
    for tuning in TRIED:
        times = [
            bench_us(lambda b=b, t=tuning: group.folded_swiglu(backward=b, tuning=t)) for b in ways
        ]
        names = ("tokens", "features", "warps", "stages", "programs", "registers")
        setting = {name: getattr(tuning, name) for name in names}
        more = [us - base for us, base in zip(times, plain, strict=True)]
        print(
            "  ",
            *(f"{name} {value:3}" for name, value in setting.items()),
            f"| forward {times[0]:.1f} (+{more[0]:.1f}) backward {times[1]:.1f} (+{more[1]:.1f})",
        )
        line = {"what": "setting", "case": vars(case), **setting}
        lines.append({**line, "us": times, "plain_us": plain})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--settings", action="store_true")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", help="append the results to this file, a line each")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    mixed, small = Case(args.tokens, 8, "mixed", 0.0), Case(args.tokens, 8, "16", 0.0)
    checks = [(mixed, True), (Case(1000, 7, "5", 0.1), True), (Case(777, 3, "256", 0.0), False)]
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        made = [pool.submit(compile_case, *pair) for pair in checks if args.check]
        if args.settings:
            made += [
                pool.submit(compile_setting, replace(case, tokens=8192), tuning)
                for case in (mixed, small)
                for tuning in TRIED
            ]
        for each in made:
            each.result()
    lines = []
    if args.check:
        lines += [check(case, shadow=shadow) for case, shadow in checks]
        print("same bits with other neighbours:", check_neighbours())
    if args.settings:
        lines += [*time_settings(mixed), *time_settings(small)]
    common = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    for line in lines if args.json else []:
        with open(args.json, "a") as file:
            file.write(json.dumps({**common, **line}) + "\n")


if __name__ == "__main__":
    main()
