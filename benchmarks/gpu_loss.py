"""What the loss costs on one GPU: output head and cross-entropy, in torch and with the kernel.

    python benchmarks/gpu_loss.py --json benchmarks/results/h200_loss.jsonl
    python benchmarks/gpu_loss.py --tune      # tiles and warps of the kernel, and sizes of chunks

First a check: losses and gradients of both ways against float64 on fresh inputs, outputs poisoned
with NaN, a twin with one target off refused, two runs with the same bits. Then the times of both
ways, of the kernel's stages, and what they cannot go below: the two products, and the bytes of
the logits (written by a product; read twice and written once; read by a product), at the speed at
which this device copies. Tables first, then one JSON line.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton

from tlora.kernels.linear_cross_entropy.function import (
    rows_at_a_time,
    write_fused,
    write_plain,
)
from tlora.kernels.linear_cross_entropy.triton_softmax import (
    SOFTMAX,
    Tuning,
    cross_entropy,
    new_logits,
)
from tlora.runtime.benchmark.record import commit

VOCABULARY = 128_256
HEADS = {"8b": 4096, "1b": 2048}
BLOCKS, WARPS = (4096, 8192, 16384, 32768), (4, 8, 16, 32)
CHUNKS = (1024, 2048, 4096, 8192)
DTYPE = torch.bfloat16
# Relative, against float64 of the rounded inputs: bf16 keeps 8 bits of every logit and error.
LOSS_LIMIT, GRADIENT_LIMIT = 2e-3, 1e-2
Step = Callable[[], object]


class Head:
    """A head, rows, and where losses and gradients go."""

    def __init__(self, width: int, rows: int, vocabulary: int = VOCABULARY) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=DTYPE)

        self.hidden = normal(rows, width)
        self.weight = normal(vocabulary, width) * (2.5 / width**0.5)
        self.targets = torch.randint(0, vocabulary, (rows,), device="cuda")
        self.losses = torch.full((rows,), torch.nan, device="cuda")
        self.gradient = torch.full_like(self.hidden, torch.nan)

    def run(self, write, chunk_rows: int, *, gradient: bool = True) -> None:
        target = self.gradient if gradient else None
        write(self.losses, target, self.hidden, self.weight, None, self.targets, chunk_rows)

    def results(self, write, chunk_rows: int) -> list[torch.Tensor]:
        self.losses.fill_(torch.nan)
        self.gradient.fill_(torch.nan)
        self.run(write, chunk_rows)
        return [self.losses.clone(), self.gradient.clone()]

    def chunk_sizes(self) -> dict[str, int]:
        vocabulary, device = len(self.weight), self.hidden.device
        size = rows_at_a_time(vocabulary, device, fused_itemsize=DTYPE.itemsize)
        return {"torch": rows_at_a_time(vocabulary, device), "kernel": size}


def right(head: Head, targets: torch.Tensor) -> list[torch.Tensor]:
    """In float64, a few rows at a time."""
    losses, gradients, weight = [], [], head.weight.double()
    for x, chosen in zip(head.hidden.double().split(256), targets.split(256), strict=True):
        logits = x @ weight.T
        losses.append(F.cross_entropy(logits, chosen, reduction="none"))
        error = logits.softmax(1)
        error[torch.arange(len(x), device=x.device), chosen] -= 1
        gradients.append(error @ weight)
    return [torch.cat(losses), torch.cat(gradients)]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def check(width: int, vocabulary: int) -> dict[str, object]:
    """Worst errors of both ways, and of a twin with one target in a hundred off."""
    head = Head(width, 700, vocabulary)
    wanted = right(head, head.targets)
    off = head.targets.clone()
    off[::100] = (off[::100] + 1) % vocabulary
    twin = right(head, off)
    errors = {}
    for name, write in (("torch", write_plain), ("kernel", write_fused)):
        found = head.results(write, 256)
        errors[name] = [relative(*pair) for pair in zip(found, wanted, strict=True)]
        errors[f"{name} twin"] = [relative(*pair) for pair in zip(found, twin, strict=True)]
    again = head.results(write_fused, 256)
    same = all(torch.equal(u, v) for u, v in zip(found, again, strict=True))
    limits = (LOSS_LIMIT, GRADIENT_LIMIT)
    ok = same and all(e < limit for e, limit in zip(errors["kernel"], limits, strict=True))
    ok = ok and all(e > limit for e, limit in zip(errors["kernel twin"], limits, strict=True))
    shown = " | ".join(f"{k} {e[0]:.1e} {e[1]:.1e}" for k, e in errors.items())
    print(f"check {width} x {vocabulary}: loss, gradient: {shown} | same bits {same} | ok {ok}")
    return {"width": width, "vocabulary": vocabulary, "errors": errors, "same": same, "ok": ok}


def milliseconds(steps: dict[str, Step], rounds: int = 9) -> dict[str, float]:
    """Medians; rounds interleave the steps, so that drift hits all alike."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, step in steps.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            stop.record()
            stop.synchronize()
            samples[name].append(start.elapsed_time(stop))
    return {name: statistics.median(values) for name, values in samples.items()}


def copy_gb_s() -> float:
    """Bytes read and written per second by a copy of 2 GiB."""
    source = torch.empty(2**30, dtype=torch.int16, device="cuda")
    target = torch.empty_like(source)
    ms = milliseconds({"copy": lambda: target.copy_(source)})["copy"]
    return 2 * source.numel() * source.itemsize / ms / 1e6


def stage_steps(head: Head, rows: int) -> dict[str, Step]:
    """Of one chunk."""
    x = head.hidden[:rows]
    logits = new_logits(rows, len(head.weight), x)
    torch.mm(x, head.weight.T, out=logits)
    targets, losses, gradient = head.targets[:rows], head.losses[:rows], head.gradient[:rows]

    def kernel(gradient: bool) -> None:
        cross_entropy(losses, logits, targets, gradient=gradient)

    return {
        "logits": lambda: torch.mm(x, head.weight.T, out=logits),
        "kernel": lambda: kernel(True),
        "kernel, losses only": lambda: kernel(False),
        "gradient": lambda: torch.mm(logits, head.weight, out=gradient),
    }


def peak_gib(step: Step) -> float:
    """Beyond what was held before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def measure(name: str, rows: int, gb_s: float) -> dict[str, object]:
    head = Head(HEADS[name], rows)
    sizes = head.chunk_sizes()
    ways = {"torch": write_plain, "kernel": write_fused}
    steps = {}
    for way, write in ways.items():
        chunk = sizes[way]
        steps[way] = lambda write=write, chunk=chunk: head.run(write, chunk)
        steps[f"{way}, losses only"] = lambda write=write, chunk=chunk: head.run(
            write, chunk, gradient=False
        )
    peaks = {step: peak_gib(run) for step, run in steps.items()}
    times = milliseconds(steps)
    chunk = min(sizes["kernel"], rows)
    stages = milliseconds(stage_steps(head, chunk))
    held = chunk * len(head.weight) * DTYPE.itemsize
    chunks = rows / chunk
    products = (stages["logits"] + stages["gradient"]) * chunks
    floor = products + 3 * held * chunks / gb_s / 1e6
    flops = 4 * rows * len(head.weight) * HEADS[name]
    print(f"{name}: {rows} rows, head {HEADS[name]} x {len(head.weight)}, chunks {sizes}")
    for step, ms in times.items():
        print(f"  {step:22} {ms:8.2f} ms, {peaks[step]:.2f} GiB beside the tensors")
    for stage, ms in stages.items():
        passes = {"kernel": 3, "kernel, losses only": 1}.get(stage)
        speed = f"{passes * held / ms / 1e6:6.0f} GB/s of {gb_s:.0f}" if passes else (
            f"{flops / 2 / chunks / ms / 1e9:6.0f} TFLOP/s"
        )  # fmt: skip
        print(f"  one chunk: {stage:19} {ms:8.3f} ms {speed}")
    print(f"  floor {floor:.2f} ms: products {products:.2f}, three passes {floor - products:.2f}")
    print(f"  torch / kernel {times['torch'] / times['kernel']:.2f}")
    print(f"  kernel / floor {times['kernel'] / floor:.2f}")
    return {
        "head": name,
        "width": HEADS[name],
        "vocabulary": len(head.weight),
        "rows": rows,
        "chunk_rows": sizes,
        "ms": times,
        "peak_gib": peaks,
        "chunk_ms": stages,
        "kernel_gb_s": 3 * held / stages["kernel"] / 1e6,
        "products_ms": products,
        "floor_ms": floor,
    }


def tune(name: str, rows: int) -> dict[str, object]:
    """The kernel under every tuning, and the whole under every size of chunk."""
    head = Head(HEADS[name], rows)
    chunk = min(rows, 4096)
    logits = new_logits(chunk, len(head.weight), head.hidden)
    torch.mm(head.hidden[:chunk], head.weight.T, out=logits)
    targets, losses = head.targets[:chunk], head.losses[:chunk]
    steps = {}
    for block in BLOCKS:
        # A tile has at least 8 logits, 16 bytes, per thread, and at most 64.
        for warps in (w for w in WARPS if 256 * w <= block <= 2048 * w):
            tuning = Tuning(block=block, warps=warps)
            steps[f"block {block}, warps {warps}"] = lambda tuning=tuning: cross_entropy(
                losses, logits, targets, gradient=True, tuning=tuning
            )
    kernel = milliseconds(steps)
    sizes = [size for size in CHUNKS if size <= rows]
    whole = milliseconds({str(c): lambda c=c: head.run(write_fused, c) for c in sizes})
    for what, times in (("kernel, 4,096 rows", kernel), (f"{name}, chunks of", whole)):
        for setting, ms in sorted(times.items(), key=lambda item: item[1]):
            print(f"  {what} {setting:24} {ms:8.3f} ms")
    return {"head": name, "rows": rows, "kernel_ms": kernel, "chunks_ms": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", nargs="+", default=["8b", "1b"], choices=HEADS)
    parser.add_argument("--rows", type=int, nargs="+", default=[8192])
    parser.add_argument("--tune", action="store_true", help="tunings and sizes of chunks as well")
    parser.add_argument("--json", type=Path, help="append the JSON line to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    checks = [check(512, VOCABULARY), check(512, 50_257), check(256, 262_144)]
    gb_s = copy_gb_s()
    results = [measure(name, rows, gb_s) for name in args.heads for rows in args.rows]
    tunings = [tune(name, max(args.rows)) for name in args.heads] if args.tune else []
    line = json.dumps(
        {
            "v": 1,
            "kind": "loss",
            "commit": commit(),
            "command": " ".join(["python", *sys.argv]),
            "device": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "tuning": vars(SOFTMAX),
            "copy_gb_s": gb_s,
            "checks": checks,
            "results": results,
            "tunings": tunings,
        }
    )
    print(line)
    if args.json is not None:
        with args.json.open("a") as file:
            file.write(line + "\n")
    if not all(entry["ok"] for entry in checks):
        sys.exit("a check failed")


if __name__ == "__main__":
    main()
