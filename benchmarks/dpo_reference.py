"""What the reference of preference pairs costs, computed in a pass of its own or beside the pairs.

    python benchmarks/dpo_reference.py [MODEL] [--device cuda] [--dtype bfloat16] [--length 512]

A training pass over pairs, a forward pass over them without adapters, and a training pass in which
they stand twice, once with the adapter and once without: process time on a CPU with one thread,
wall time on a GPU, the median of several in turn. A line of JSON at the end.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from tlora.core.job import BaseSpec, DataSpec, JobSpec, LoraSpec
from tlora.core.sequence import IGNORED, TokenSequence
from tlora.model.loading import load_base
from tlora.model.packing import Share, pack
from tlora.model.super_model import SuperModel
from tlora.training import loss

REPEATS = 15
WARM_UPS = 3
TOKENS = 2048


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    model = SuperModel(load_base(_base(options), device), compiled=device.type == "cuda")
    job = JobSpec(name="taste", data=DataSpec(path="in memory"), lora=LoraSpec(r=16))
    model.attach("taste", model.new_adapter(job), scale=2.0)
    rows = _rows(options.tokens // options.length, options.length, model.vocabulary)
    count = len(rows)

    def share(name: str, scale: float) -> Share:
        return Share(name, rows, [0] * count, [scale] * count)

    size = count * options.length
    own = pack([share("taste", 1 / count)], size, device)
    both = pack([share("taste", 1 / count), share("", 0.0)], 2 * size, device)

    def train(batch) -> None:
        with torch.enable_grad(), model.routed(batch, train=True):
            loss.backward(model.token_losses(batch), batch.loss_scales)

    def refer() -> None:
        with torch.no_grad(), model.routed(own, train=False):
            model.token_losses(own)

    arms = {"train": lambda: train(own), "reference": refer, "beside": lambda: train(both)}
    seconds = _measure(arms, device)
    found = {name: statistics.median(each) for name, each in seconds.items()}
    apart, beside = found["reference"] / found["train"], found["beside"] / found["train"] - 1
    print(f"a training pass over {size} tokens: {1e3 * found['train']:.1f} ms")
    print(f"the reference in a pass of its own, once for each pair: {apart:+.0%}")
    print(f"the reference beside the pairs, in every epoch: {beside:+.0%}")
    record = {"v": 1, "kind": "dpo_reference", "model": options.model, "device": str(device)}
    figures = {name: round(value, 6) for name, value in found.items()}
    print(json.dumps(record | {"tokens": size, "length": options.length, "seconds": figures}))


def _base(options: argparse.Namespace) -> BaseSpec:
    from tlora.core.assets import DEMO

    model = str(DEMO / "base") if options.model == "demo" else options.model
    return BaseSpec(model=model, dtype=options.dtype)


def _rows(count: int, length: int, vocabulary: int) -> list[TokenSequence]:
    """A third of each a prompt."""
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        ids = generator.integers(0, vocabulary, length).astype(np.int32)
        labels = ids.copy()
        labels[: length // 3] = IGNORED
        rows.append(TokenSequence(ids, labels))
    return rows


def _measure(arms: dict[str, Callable[[], None]], device: torch.device) -> dict[str, list[float]]:
    on_gpu = device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(WARM_UPS + REPEATS):
        for name, arm in arms.items():
            started = clock()
            arm()
            if on_gpu:
                torch.cuda.synchronize()
            if repeat >= WARM_UPS:
                seconds[name].append(clock() - started)
    return seconds


if __name__ == "__main__":
    main()
