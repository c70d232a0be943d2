"""Loads a base as one of eight ranks, then whole: the most memory that each took, in bytes, and
whether the shards hold what the whole one holds. Run as a program, for a process of its own."""

import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tlora.core.job import BaseSpec
from tlora.core.plan import Plan
from tlora.model.loading import load_base
from tlora.parallel.counting import Counts
from tlora.parallel.mesh import shard_mesh
from tlora.parallel.shard_loading import load_sharded

RANKS = 8


def resident() -> int:
    """Pages of files included."""
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


def most_memory(load: Callable[[], object]) -> tuple[int, object]:
    gc.collect()
    before, peak, done = resident(), [0], threading.Event()

    def look() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], resident())
            time.sleep(0.0005)

    watcher = threading.Thread(target=look)
    watcher.start()
    found = load()
    peak[0] = max(peak[0], resident())
    done.set()
    watcher.join()
    return peak[0] - before, found


def main(path: str) -> None:
    rank = 3
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    device, base = torch.device("cpu"), BaseSpec(model=path)
    mesh = shard_mesh(Plan(bucket=64, fsdp=RANKS), device)
    # What is set up once is no part of either.
    load_sharded(base, device, mesh, counts=Counts())
    in_shards, (model, _) = most_memory(
        lambda: load_sharded(base, device, mesh, counts=Counts())  # type: ignore[misc]
    )

    def load_whole() -> torch.nn.Module:
        found = load_base(base, device)
        # It is only mapped so far: a forward reads it.
        for parameter in found.parameters():
            parameter.sum()
        return found

    whole, full = most_memory(load_whole)
    expected = dict(full.named_parameters())  # type: ignore[attr-defined]
    same = True
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        own = expected[name].chunk(RANKS)[rank]
        same &= torch.equal(parameter.to_local(), own)
    buffers = dict(full.named_buffers())  # type: ignore[attr-defined]
    for name, buffer in model.named_buffers():
        same &= torch.equal(buffer, buffers[name])
    model_bytes = sum(4 * each.numel() for each in expected.values())
    print(json.dumps({"shards": in_shards, "whole": whole, "model": model_bytes, "same": same}))


if __name__ == "__main__":
    main(sys.argv[1])
