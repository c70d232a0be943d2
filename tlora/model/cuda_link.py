"""Page-locked buffers and a stream of its own for each way: how copies between a CUDA device and
the host stay out of the way of training."""

from collections.abc import Callable, Sequence

import torch

from tlora.model.snapshot import AtOnce, Courier, InBackground
from tlora.model.staging import Lane

STAGING_BYTES = 64 << 20


class CudaLane:
    def __init__(self, numel: int, stream: torch.cuda.Stream) -> None:
        self.buffer = torch.empty(numel, pin_memory=True)
        self._stream = stream
        # A thread that waits must not keep a core busy.
        self._done = torch.cuda.Event(blocking=True)

    def read(self, source: torch.Tensor) -> None:
        self._copy(self.buffer[: len(source)], source)

    def write(self, target: torch.Tensor) -> None:
        self._copy(target, self.buffer[: len(target)])

    def wait(self) -> None:
        self._done.synchronize()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._done.record(self._stream)


class CudaLink:
    def __init__(self, device: torch.device, staging_bytes: int = STAGING_BYTES) -> None:
        self.device = device
        self._numel = staging_bytes // 4

    def enter(self) -> None:
        # Every thread has a current device of its own, the first. One that goes back to it from a
        # stream of another would take memory for a context there.
        torch.cuda.set_device(self.device)

    def lanes(self) -> Sequence[Lane]:
        stream = torch.cuda.Stream(self.device)
        return [CudaLane(self._numel, stream) for _ in range(2)]

    def mark(self) -> Callable[[], None]:
        here = torch.cuda.Event(blocking=True)
        here.record(torch.cuda.current_stream(self.device))
        return here.synchronize

    def has_room(self, num_bytes: int) -> bool:
        """Beside the most that training has held so far: what is free between nano-batches is
        needed by the next one."""
        free, _ = torch.cuda.mem_get_info(self.device)
        # As it is kept: to sort all of it by name takes longer than the rest of a snapshot.
        known = torch.cuda.memory_stats_as_nested_dict(self.device)
        cached, most = (
            known[kind]["all"][when]
            for kind, when in (("reserved_bytes", "current"), ("allocated_bytes", "peak"))
        )
        return free + cached - most >= num_bytes


def courier_for(device: torch.device) -> Courier:
    return InBackground(CudaLink(device)) if device.type == "cuda" else AtOnce()
