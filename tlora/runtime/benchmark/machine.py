"""The machine under the benchmark: its clock, its memory, and how fast it multiplies and copies."""

import math
import mmap
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from tlora.core.wording import number_of
from tlora.kernels import host_products

STATM = Path("/proc/self/statm")
MEMINFO = Path("/proc/meminfo")
SAMPLE_SECONDS = 0.002
CEILING_TRIES = 10
CEILING_SECONDS = 2.0
WARM_UPS_OF_A_CAPTURE = 3
CUDA_SAMPLE_SECONDS = 0.15
"""Samples of 40 ms begin at whatever clock the one before has left."""


def now(device: torch.device) -> float:
    """Seconds, once all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Clock:
    """Runs from when the device has done what was asked of it until now, which is not waited
    for, until it has done what is asked of it until `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self._started = time.perf_counter()

    def stop(self) -> float:
        """Seconds."""
        if self._event is None:
            return now(self._device) - self._started
        last = torch.cuda.Event(enable_timing=True)
        last.record()
        last.synchronize()
        return self._event.elapsed_time(last) / 1e3


def free_for_training(device: torch.device) -> float:
    """Seconds, once nothing keeps host and device from the next nano-batch: what a thread copies on
    a stream of its own does not."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def seconds_in_turn(
    steps: Sequence[Callable[[], object]], device: torch.device, *, rounds: int = 5
) -> list[float]:
    """Of one call of each, medians. The clock of a GPU follows the power of what it has just done,
    and is highest after a rest. So a sample comes behind its own like, as long and not timed, and
    every other round goes backwards: whatever was first would seem faster than it is."""
    calls = [_calls_of_a_sample(step, device) for step in steps]
    samples: list[list[float]] = [[] for _ in steps]
    for number in range(rounds):
        for i in range(len(steps))[:: -1 if number % 2 else 1]:
            for _ in range(calls[i]):
                steps[i]()
            started = now(device)
            for _ in range(calls[i]):
                steps[i]()
            samples[i].append((now(device) - started) / calls[i])
    return [statistics.median(each) for each in samples]


def _calls_of_a_sample(step: Callable[[], object], device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    step()
    started = now(device)
    step()
    return max(1, math.ceil(CUDA_SAMPLE_SECONDS / (now(device) - started)))


def replayed(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """A step as nano-batches run it: on CUDA from a captured graph, so that its kernels are timed
    and not the host that launches them."""
    if device.type != "cuda":
        return step
    current, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    aside.wait_stream(current)
    with torch.cuda.stream(aside):
        for _ in range(WARM_UPS_OF_A_CAPTURE):
            step()
    current.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def fastest_seconds(step: Callable[[], object], device: torch.device) -> float:
    """Of one call. A ceiling is what the machine can do when nothing disturbs it; one that is
    very slow, such as half precision on some CPUs, is not tried as often."""
    samples: list[float] = []
    while len(samples) < CEILING_TRIES and sum(samples) < CEILING_SECONDS:
        started = now(device)
        step()
        samples.append(now(device) - started)
    return min(samples)


def gemm_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """The rate of one large square product, in the better layout: forward and backward use one
    each, and in half precision a CPU may be far slower in one of them."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = min(
        fastest_seconds(lambda b=b: host_products.linear(left, b, None), device)
        for b in (right, right.T)
    )
    return 2 * size**3 / seconds


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written by a copy that no cache holds."""
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / fastest_seconds(lambda: target.copy_(source), device)


def free_bytes(device: torch.device) -> int | None:
    """What can still be allocated; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def resident_bytes() -> int | None:
    try:
        return int(STATM.read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return None


class Peak:
    """`bytes` once the watch is over; None where the system does not say."""

    def __init__(self) -> None:
        self.bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """CUDA: the most that torch had allocated, weights included. CPU: how much the process grew."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device)
        return
    before = resident_bytes()
    if before is None:
        yield peak
        return
    highest = before
    over = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not over.wait(SAMPLE_SECONDS):
            highest = max(highest, resident_bytes() or 0)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()
    peak.bytes = max(highest, resident_bytes() or 0) - before


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {number_of(torch.get_num_threads(), 'thread')}"
