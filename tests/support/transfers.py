"""A device for couriers that lies in host memory and is as slow as a test wants."""

import threading
from collections.abc import Callable, Sequence

import torch


class LateLane:
    """A device that copies at the last moment: whoever does not wait finds rubbish."""

    def __init__(self, numel: int) -> None:
        self.buffer = torch.full((numel,), torch.nan)
        self._under_way: tuple[torch.Tensor, torch.Tensor] | None = None
        self.used = 0

    def read(self, source: torch.Tensor) -> None:
        self._begin(self.buffer[: len(source)], source)

    def write(self, target: torch.Tensor) -> None:
        self._begin(target, self.buffer[: len(target)])

    def _begin(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self._under_way is None, "a lane is used before its last copy is through"
        self._under_way = (target, source)
        self.used += 1

    def wait(self) -> None:
        assert self._under_way is not None
        target, source = self._under_way
        target.copy_(source)
        self._under_way = None


class SlowLink:
    """A device in host memory: copies do not begin before the gate is open."""

    device = torch.device("cpu")

    def __init__(self, staging: int = 5, room: bool = True) -> None:
        self.staging = staging
        self.room = room
        self.gate = threading.Event()
        self.asked: list[int] = []
        self.entered: list[int] = []
        """Threads that copy."""

    def enter(self) -> None:
        self.entered.append(threading.get_ident())

    def lanes(self) -> Sequence[LateLane]:
        assert threading.get_ident() in self.entered
        return [LateLane(self.staging) for _ in range(2)]

    def mark(self) -> Callable[[], None]:
        gate = self.gate

        def wait() -> None:
            assert gate.wait(300)

        return wait

    def has_room(self, num_bytes: int) -> bool:
        self.asked.append(num_bytes)
        return self.room
