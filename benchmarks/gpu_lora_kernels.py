"""Every multi-LoRA kernel of a training step under several settings, beside its byte floor.

    python benchmarks/gpu_lora_kernels.py --json kernels.jsonl          # all of it, about 90 s
    python benchmarks/gpu_lora_kernels.py --models 8b --kernels reduce_b sum
    python benchmarks/gpu_lora_kernels.py --models 8b --groups gate_up --jobs 32 --settings 64x256
    TRITON_INTERPRET=1 python benchmarks/gpu_lora_kernels.py --dry      # the script itself, no GPU

No model is needed: the linears of a Llama 8B or 1B layer, random values, eight jobs of rank 8, 16,
32, 64 twice (or --jobs), sequences of 512 (at 2,048 tokens four of the jobs have tokens). Launches
rotate over the buffers of several layers, so that the L2 cache is cold, in a captured graph, so
that the host does not count. --clock holds the clock where the products of a layer have it (1,455
MHz on an H200), if the driver lets us. Each setting is compared with a float32 product of the same
values, outputs poisoned with NaN; a product 1 % off must be refused. One JSON line per row is
written as it is measured.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
from kernel_candidates import Candidate, candidates
from kernel_cases import LAYERS, MODELS, Layer, Place, floor_us, launch, part_of
from kernel_checks import check
from kernel_compiling import compile_only, remember_compiled, resources, start_compiler
from triton.runtime import driver

from tlora.kernels.multi_lora.blocks import Blocks
from tlora.runtime.benchmark.record import commit

KERNELS = ("reduce_b", "sum", "reduce_a", "expand_y", "expand_dx", "shrink_x")


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


@contextlib.contextmanager
def held_clock(mhz: int) -> Iterator[bool]:
    """Whether the device keeps this clock meanwhile; 0: as it comes."""
    tool = shutil.which("nvidia-smi") if mhz else None
    if tool is None:
        yield False
        return
    asked = [tool, "--lock-gpu-clocks", f"{mhz},{mhz}"]
    held = subprocess.run(asked, capture_output=True, check=False).returncode == 0
    try:
        yield held
    finally:
        if held:
            subprocess.run([tool, "--reset-gpu-clocks"], capture_output=True, check=False)


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
                        chosen = candidates(kernel, num_tokens, len(place.outs))
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
            self.args.workers, mp_context=context, initializer=start_compiler, initargs=(target,)
        )
        for place, kernel, candidate, tile in self.work():
            key = self.key(place, kernel, candidate, tile)
            if key not in self.compiled:
                self.compiled[key] = self.pool.submit(compile_only, kernel, place, candidate, tile)

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
    parser.add_argument("--clock", type=int, default=0, metavar="MHZ", help="hold it")
    parser.add_argument("--dry", action="store_true", help="tiny shapes in Triton's interpreter")
    args = parser.parse_args()
    if args.dry:
        args.models, args.tokens = ["dry"], [96]
    elif not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, or --dry and TRITON_INTERPRET=1")
    torch.backends.cuda.matmul.allow_tf32 = False
    if not args.dry:
        remember_compiled()
        print(versions())
    with held_clock(args.clock) as held:
        if args.clock and not held:
            sys.exit(f"the clock cannot be held at {args.clock} MHz here")
        bench = Bench(args)
        bench.facts["clock_mhz"] = args.clock or None
        try:
            bench.run()
        finally:
            bench.tables()
            bench.close()


if __name__ == "__main__":
    main()
