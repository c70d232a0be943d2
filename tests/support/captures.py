"""What torch does with streams and memory when graphs are captured on a device, on a machine
without one. Nothing is captured: what runs meanwhile runs as always."""

import pytest
import torch

DEFAULT = "the default stream"
Pool = tuple[int, int]


class Device:
    """`ends_pools`: torch forgets that it allocates for a capture that cannot be ended, as it does
    from 2.12 on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ends_pools: bool) -> None:
        self.ends_pools = ends_pools
        self.stream: object = DEFAULT
        """The current one."""

        self.is_valid = True
        """What is captured now."""

        self.capturing: list[Pool] = []
        """Those that torch allocates for."""

        self.users: dict[Pool, int] = {}
        """Graphs of each pool."""

        cuda = {
            "synchronize": lambda *_: None,
            "Stream": lambda *_: object(),
            "Event": Event,
            "stream": lambda stream: OnStream(self, stream),
            "empty_cache": self._empty_cache,
            "graph_pool_handle": lambda: (0, len(self.users) + 1),
            "CUDAGraph": lambda: Graph(self),
        }
        for name, stand_in in cuda.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        private = {"_host_emptyCache": lambda: None, "_cuda_endAllocateToPool": self._end}
        for name, stand_in in private.items():
            monkeypatch.setattr(torch._C, name, stand_in, raising=False)

    @property
    def is_capturing(self) -> bool:
        return self.stream is not DEFAULT and bool(self.capturing)

    def synchronise(self) -> None:
        """What a model does that waits for a number: no graph can."""
        if self.is_capturing:
            self.is_valid = False
            raise RuntimeError("operation not permitted when stream is capturing")

    def _empty_cache(self) -> None:
        if self.capturing:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def _end(self, device: int, pool: Pool) -> None:
        if pool not in self.capturing:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.capturing.remove(pool)


class OnStream:
    """While entered: the current stream is this one."""

    def __init__(self, device: Device, stream: object) -> None:
        self._device, self._stream = device, stream

    def __enter__(self) -> None:
        self._before, self._device.stream = self._device.stream, self._stream

    def __exit__(self, *_: object) -> None:
        self._device.stream = self._before


class Graph:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._pool: Pool | None = None
        self.replays = 0

    def capture_begin(self, pool: Pool, **_: object) -> None:
        assert self._device.stream is not DEFAULT
        if self._device.users.setdefault(pool, 1) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self._device.users[pool] += 1
        self._device.capturing.append(pool)
        self._pool = pool

    def capture_end(self) -> None:
        device, pool = self._device, self._pool
        assert pool is not None
        was_valid, device.is_valid = device.is_valid, True
        if was_valid or device.ends_pools:
            device.capturing.remove(pool)
        if not was_valid:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.replays += 1


class Event:
    """Each as far from the one before as the host."""

    def __init__(self, **_: object) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: "Event") -> float:
        return 0.0
