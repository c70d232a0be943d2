"""A copy of tensors that is taken now and reaches the other side later.

`take` fixes what the tensors hold at this point of the device's order and returns at once; a thread
of its own brings the copy to the host while training goes on. `bring` is the way back: host tensors
onto the device, before anybody needs them there. On a CPU both are done when they return.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

import torch

from tlora.model.memory import is_out_of_memory
from tlora.model.staging import Lane, copy_in, copy_out, runs

T = TypeVar("T")
Make = Callable[[list[torch.Tensor]], T]
"""What is made of the tensors that arrived, in their order."""

SLAB_BYTES = 256 << 20
"""A copy on the device lies in slabs of about so much, each of which is freed when it has been
read."""


class Snapshot(Generic[T]):
    """A value on its way."""

    def __init__(self, future: Future[T], num_bytes: int) -> None:
        self._future = future
        self.num_bytes = num_bytes
        """Memory it takes on either side."""

    @classmethod
    def of(cls, value: T, num_bytes: int = 0) -> "Snapshot[T]":
        """One that has arrived."""
        future: Future[T] = Future()
        future.set_result(value)
        return cls(future, num_bytes)

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self) -> T:
        """Waits. Raises what kept it from arriving."""
        return self._future.result()


class Unmade(Snapshot[T]):
    """One of which nothing is made before somebody asks: of all that are taken of a job that gets
    better and better, most are never asked for."""

    def __init__(self, arriving: Future[list[torch.Tensor]], num_bytes: int, make: Make[T]) -> None:
        super().__init__(Future(), num_bytes)
        self._arriving: Future[list[torch.Tensor]] | None = arriving
        self._make = make
        self._asked = threading.Lock()

    @property
    def done(self) -> bool:
        arriving = self._arriving
        return arriving is None or arriving.done()

    def result(self) -> T:
        with self._asked:
            if self._arriving is not None:
                try:
                    self._future.set_result(self._make(self._arriving.result()))
                except Exception as error:
                    self._future.set_exception(error)
                # Whatever is not part of the value is let go.
                self._arriving = None
        return self._future.result()

    def wait(self) -> None:
        """Until it has arrived. Raises what kept it from that."""
        if self._arriving is not None:
            self._arriving.result()


class Courier(Protocol):
    def take(self, tensors: Sequence[torch.Tensor], make: Make[T]) -> Snapshot[T]:
        """Copies in host memory of what these contiguous float32 tensors hold now. `make` is
        called once, when somebody asks or before."""
        ...

    def bring(self, tensors: Sequence[torch.Tensor], make: Make[T]) -> Snapshot[T]:
        """These host tensors where the model is. They must not change until it is done."""
        ...


class AtOnce:
    """For models in host memory."""

    def take(self, tensors: Sequence[torch.Tensor], make: Make[T]) -> Snapshot[T]:
        return Snapshot.of(make([tensor.clone() for tensor in tensors]), bytes_of(tensors))

    def bring(self, tensors: Sequence[torch.Tensor], make: Make[T]) -> Snapshot[T]:
        return Snapshot.of(make(list(tensors)), bytes_of(tensors))


class Link(Protocol):
    """What a device does for its courier."""

    device: torch.device

    def enter(self) -> None:
        """Called by each thread that copies, before anything else."""
        ...

    def lanes(self) -> Sequence[Lane]:
        """Two staging buffers that are used by one thread; made when they are first needed."""
        ...

    def mark(self) -> Callable[[], None]:
        """This point of the device's order. What comes back waits for it."""
        ...

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much can be held without taking it from the next nano-batch."""
        ...


class InBackground:
    """For models on a device: one thread each way, so that who comes does not wait for who goes."""

    def __init__(self, link: Link, *, slab_bytes: int = SLAB_BYTES) -> None:
        self._link = link
        self._slab_numel = slab_bytes // 4
        self._lanes: dict[str, Sequence[Lane]] = {}
        self._room = threading.Lock()
        """Several threads may bring: room that one has seen is not another's."""

        self._out, self._in = (
            ThreadPoolExecutor(1, thread_name_prefix=f"snapshots {way}", initializer=link.enter)
            for way in ("out", "in")
        )

    @torch.no_grad()
    def take(self, tensors: Sequence[torch.Tensor], make: Make[T]) -> Snapshot[T]:
        sources = [tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in tensors]
        slabs = self._cloned(sources)
        arrive = self._link.mark()
        groups = slabs if slabs is not None else [[source] for source in sources]
        shapes = [tensor.shape for tensor in tensors]

        def work() -> list[torch.Tensor]:
            arrive()
            with torch.no_grad():
                return copy_out(groups, self._of("out"))

        def shaped(flat: list[torch.Tensor]) -> T:
            return make(_shaped(flat, shapes))

        snapshot = Unmade(self._out.submit(work), bytes_of(tensors), shaped)
        if slabs is None:
            # No room for a copy beside the original: nobody may write to it before it is read.
            snapshot.wait()
        return snapshot

    @torch.no_grad()
    def bring(self, tensors: Sequence[torch.Tensor], make: Make[T]) -> Snapshot[T]:
        num_bytes = bytes_of(tensors)
        there = self._allocated([tensor.numel() for tensor in tensors], num_bytes)
        if there is None:
            # Straight into their places then, one by one.
            return Snapshot.of(make(list(tensors)), num_bytes)
        arrive = self._link.mark()
        flat = [each for slab in there for each in slab]

        def work() -> T:
            arrive()
            with torch.no_grad():
                copy_in([tensor.reshape(-1) for tensor in tensors], there, self._of("in"))
                return make(_shaped(flat, [tensor.shape for tensor in tensors]))

        return Snapshot(self._in.submit(work), num_bytes)

    def _cloned(self, sources: list[torch.Tensor]) -> list[list[torch.Tensor]] | None:
        """Copies on the device by a few launches, in slabs; None if there is no room."""
        slabs = self._allocated([source.numel() for source in sources], bytes_of(sources))
        if slabs is not None:
            torch._foreach_copy_([each for slab in slabs for each in slab], sources)
        return slabs

    def _allocated(self, sizes: list[int], num_bytes: int) -> list[list[torch.Tensor]] | None:
        with self._room:
            if not self._link.has_room(num_bytes):
                return None
            try:
                slabs = []
                for run in runs(sizes, self._slab_numel):
                    whole = torch.empty(sum(sizes[i] for i in run), device=self._link.device)
                    slabs.append(list(whole.split([sizes[i] for i in run])))
                return slabs
            except Exception as error:
                if is_out_of_memory(error):
                    return None
                raise

    def _of(self, way: str) -> Sequence[Lane]:
        if way not in self._lanes:
            self._lanes[way] = self._link.lanes()
        return self._lanes[way]


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _shaped(flat: list[torch.Tensor], shapes: list[torch.Size]) -> list[torch.Tensor]:
    return [
        each if len(shape) == 1 else each.view(shape)
        for each, shape in zip(flat, shapes, strict=True)
    ]
