"""The optimiser steps of eight jobs on one GPU: one pooled pass against each job by itself.

    PYTHONPATH=. python3 benchmarks/gpu_optimiser.py --json benchmarks/results/h200_optimiser.jsonl
    PYTHONPATH=. python3 benchmarks/gpu_optimiser.py --sweep --shape 8b     # tiles and chunks

The pools of a whole model (every linear of every layer), ranks 8 to 64. First a check: one pooled
step against each job by itself from the same start, and a rate 1 % off, which must be refused;
copies in bfloat16 must be the new values. Then a step of all jobs and of one of them. Device time
lies between events, with the launches queued up behind a pause of the device where nothing waits
for it; wall time has the norms read. Each job by itself reads a norm per job. The floor is 38 bytes
per parameter (32, 4 for the norm, 2 for the copy) at the rate of a copy, measured here. A table,
then one JSON line.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import triton

from tlora.kernels.adamw import Order, Rows, Work, triton_steps
from tlora.kernels.adamw.triton_steps import Tuning
from tlora.kernels.adamw.work import CHUNK
from tlora.runtime.benchmark.record import commit

# Layers, and of each group of linears the input and the outputs.
SHAPES = {
    "8b": (
        32,
        [(4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,))],
    ),
    "1b": (
        16,
        [(2048, (2048, 512, 512)), (2048, (2048,)), (2048, (8192, 8192)), (8192, (2048,))],
    ),
}
RANKS = (8, 64, 16, 32, 8, 64, 16, 32)
STEP_BYTES = 38
"""Of a parameter: value, gradient and moments read and written, the gradient read for its norm, and
the copy in bfloat16 written."""

LIMIT = 1e-5
"""Of the check: relative, in float32 both ways."""


class Pools:
    """Value, gradient and moments of every matrix with its copy, and the rows of each job."""

    def __init__(self, shape: str, ranks: tuple[int, ...]) -> None:
        layers, groups = SHAPES[shape]
        self.rows: list[list[Rows]] = [[] for _ in ranks]
        self.views: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in ranks]
        self.copied: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in ranks]
        """(copy, value) of each job's rows of every matrix."""

        self.num_parameters = 0
        for width, copies in (
            (width, copies)
            for _ in range(layers)
            for num_in, outs in groups
            for width, copies in [(num_in, len(outs)), *((out, 1) for out in outs)]
        ):
            count = copies * sum(ranks)
            tensors = tuple(torch.zeros(count, width, device="cuda") for _ in range(4))
            tensors[0].normal_()
            copy = tensors[0].bfloat16()
            self.num_parameters += tensors[0].numel()
            first = 0
            for job, rank in enumerate(ranks):
                self.rows[job].append(Rows(tensors, first, copies * rank, copy))
                part = slice(first, first + copies * rank)
                self.copied[job].append((copy[part], tensors[0][part]))
                # By linear, as the engine's views of a job are.
                for _ in range(copies):
                    view = tuple(tensor[first : first + rank] for tensor in tensors)
                    self.views[job].append(view)
                    first += rank

    @property
    def matrices(self) -> list[tuple[torch.Tensor, ...]]:
        return [rows.tensors for rows in self.rows[0]]  # every job is in every matrix

    def fill_gradients(self, seed: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        for _, grad, _, _ in self.matrices:
            grad.normal_(generator=generator).mul_(1e-3)


def order(slot: int, number: int = 10) -> Order:
    """Settings that differ from job to job; every second one clips."""
    return Order(
        slot=slot,
        learning_rate=1e-4 * (1 + slot),
        beta1=0.9,
        beta2=0.999 - 0.01 * slot,
        epsilon=1e-8,
        weight_decay=0.01 * slot,
        number=number,
        max_norm=0.3 if slot % 2 else None,
    )


def each_by_itself(pools: Pools, orders: list[Order]) -> list[float]:
    """What the engine does without Triton (training/optimiser.py), and the copies."""
    norms = []
    for each in orders:
        value, grad, exp_avg, exp_avg_sq = map(list, zip(*pools.views[each.slot], strict=True))
        norm = torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(grad))))
        norms.append(float(norm))
        if each.max_norm is not None and norms[-1] + 1e-6 > each.max_norm:
            coefficient = torch.clamp(each.max_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(grad, coefficient)
        count = torch.tensor(float(each.number), device="cuda")
        torch._fused_adamw_(
            value, grad, exp_avg, exp_avg_sq, [], [count] * len(value),
            lr=each.learning_rate, beta1=each.beta1, beta2=each.beta2,
            weight_decay=each.weight_decay, eps=each.epsilon, amsgrad=False, maximize=False,
        )  # fmt: skip
        torch._foreach_zero_(grad)
        copied = pools.copied[each.slot]
        torch._foreach_copy_([copy for copy, _ in copied], [value for _, value in copied])
    return norms


def check(pools: Pools, work: Work) -> dict:
    """Both ways from the same start; the worst relative error of values and moments."""
    orders = [order(slot) for slot in range(len(RANKS))]

    def outcome(step) -> tuple[list[float], list[list[torch.Tensor]]]:
        start = torch.Generator(device="cuda").manual_seed(3)
        for value, _, exp_avg, exp_avg_sq in pools.matrices:
            value.normal_(generator=start)
            exp_avg.normal_(generator=start).mul_(1e-3)
            exp_avg_sq.normal_(generator=start).square_().mul_(1e-6)
        pools.fill_gradients(5)
        norms = step()
        # A few matrices of the first and last layers: copies of all would not fit beside them.
        kept = [*pools.matrices[:11], *pools.matrices[-11:]]
        assert not any(grad.any() for _, grad, _, _ in pools.matrices)
        assert all(
            torch.equal(copy, value.bfloat16()) for job in pools.copied for copy, value in job
        )
        return norms, [[t.clone() for t in (m[0], m[2], m[3])] for m in kept]

    def worst(one, other) -> float:
        return max(
            float((u - v).norm() / v.norm())
            for left, right in zip(one, other, strict=True)
            for u, v in zip(left, right, strict=True)
        )

    off = [each._replace(learning_rate=1.01 * each.learning_rate) for each in orders]
    norms, pooled = outcome(lambda: triton_steps.step(work, orders).tolist())
    again, pooled_again = outcome(lambda: triton_steps.step(work, orders).tolist())
    right_norms, right = outcome(lambda: each_by_itself(pools, orders))
    _, twin = outcome(lambda: triton_steps.step(work, off).tolist())
    norm_error = max(abs(u / v - 1) for u, v in zip(norms, right_norms, strict=True))
    # A rate shows in the values alone, whose norm is 1e4 times that of an update.
    moved = worst([row[:1] for row in pooled], [row[:1] for row in right])
    twin_moved = worst([row[:1] for row in twin], [row[:1] for row in right])
    same = norms == again and worst(pooled, pooled_again) == 0
    result = {
        "error": worst(pooled, right),
        "norm_error": norm_error,
        "value_error": moved,
        "value_error_of_twin": twin_moved,
        "same_bits": same,
    }
    result["ok"] = (
        result["error"] < LIMIT and norm_error < LIMIT and twin_moved > 5 * moved and same
    )
    return result


def device_ms(step, rounds: int = 12) -> float:
    """Median between events. The device sleeps first, so that launches do not wait for the host
    where the host does not wait for the device."""
    samples = []
    for _ in range(rounds + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)
        start.record()
        step()
        stop.record()
        stop.synchronize()
        samples.append(start.elapsed_time(stop))
    return statistics.median(samples[3:])


def wall_ms(step, rounds: int = 12) -> float:
    """Median of the host's time for the step and the reading of its norms."""
    samples = []
    for _ in range(rounds + 3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - started) * 1e3)
    return statistics.median(samples[3:])


def host_ms(step, rounds: int = 12) -> float:
    """Median of the host's time to launch, with the device busy."""
    samples = []
    for _ in range(rounds + 3):
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        started = time.perf_counter()
        step()
        samples.append((time.perf_counter() - started) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(samples[3:])


def copy_tb_s() -> float:
    """Read and written by a copy of 4 GiB."""
    source = torch.zeros(2**30, device="cuda")
    target = torch.empty_like(source)
    return 8 * 2**30 / device_ms(lambda: target.copy_(source)) / 1e9


def measure(shape: str) -> dict:
    rate = copy_tb_s()
    pools = Pools(shape, RANKS)
    started = time.perf_counter()
    work = Work.of(pools.rows, "cuda")
    built = (time.perf_counter() - started) * 1e3
    checked = check(pools, work)
    result = {
        "shape": shape,
        "ranks": RANKS,
        "parameters": pools.num_parameters,
        "chunks": len(work.table),
        "list_ms": round(built, 2),
        "copy_tb_s": round(rate, 3),
        "check": checked,
    }
    print(f"{shape}: {pools.num_parameters / 1e9:.3f} G parameters, check {checked}")
    print(f"{shape}: list of {len(work.table)} chunks in {built:.1f} ms; copy {rate:.2f} TB/s")
    print("due    way            device ms   TB/s   of floor   wall ms   launching ms")
    for due in (list(range(len(RANKS))), [0], [1]):
        orders = [order(slot) for slot in due]
        parameters = sum(view[0].numel() for slot in due for view in pools.views[slot])
        floor = STEP_BYTES * parameters / rate / 1e9
        name = "all" if len(due) > 1 else f"r={RANKS[due[0]]}"
        pools.fill_gradients(1)
        ways = {
            "pooled": lambda orders=orders: triton_steps.step(work, orders),
            "each by itself": lambda orders=orders: each_by_itself(pools, orders),
        }
        rows = {}
        for way, step in ways.items():
            pooled = way == "pooled"
            device = device_ms(step)
            row = {
                "device_ms": round(device, 3),
                "tb_s": round(STEP_BYTES * parameters / device / 1e9, 3),
                "of_floor": round(device / floor, 3),
                "wall_ms": round(wall_ms((lambda s=step: s().tolist()) if pooled else step), 3),
                # Each job by itself waits for the device: that is no launching.
                "launching_ms": round(host_ms(step), 3) if pooled else None,
            }
            rows[way] = row
            print(
                f"{name:6} {way:14} {device:9.3f} {row['tb_s']:7.2f} {row['of_floor']:9.2f}x"
                f" {row['wall_ms']:9.3f} {row['launching_ms'] or '':>12}"
            )
        result[name] = {"parameters": parameters, "floor_ms": round(floor, 3), **rows}
    return result


def sweep(shape: str) -> list[dict]:
    """Chunks, blocks and warps of both large kernels."""
    pools = Pools(shape, RANKS)
    pools.fill_gradients(1)
    orders = [order(slot) for slot in range(len(RANKS))]
    found = []
    for chunk in (4096, 8192, 16384, 32768):
        work = Work.of(pools.rows, "cuda", chunk=chunk)
        for block, warps in ((512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8)):
            tuning = Tuning(block=block, warps=warps)
            row: dict = {"chunk": chunk, "block": block, "warps": warps}
            for name, options in (("step", {"tuning": tuning}), ("squares", {"squares": tuning})):
                row[f"{name}_ms"] = round(
                    device_ms(lambda w=work, o=options: triton_steps.step(w, orders, **o)), 3
                )
            found.append(row)
            print(row)
    for name in ("step", "squares"):
        print(f"best with {name} varied:", min(found, key=lambda row: row[f"{name}_ms"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", nargs="+", default=["1b", "8b"], choices=SHAPES)
    parser.add_argument("--sweep", action="store_true", help="time chunks and tiles instead")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    results = []
    for shape in args.shape:
        results.append({"shape": shape, "sweep": sweep(shape)} if args.sweep else measure(shape))
        torch.cuda.empty_cache()
    line = json.dumps(
        {
            "benchmark": "gpu_optimiser",
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": commit(),
            "command": " ".join(sys.argv),
            "chunk": CHUNK,
            "results": results,
        }
    )
    print(line)
    if args.json:
        with args.json.open("a") as file:
            file.write(line + "\n")
    if not args.sweep and not all(result["check"]["ok"] for result in results):
        sys.exit("the check failed")


if __name__ == "__main__":
    main()
