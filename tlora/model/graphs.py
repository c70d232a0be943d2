"""The backbone's forward and backward of a nano-batch as two captured CUDA graphs; the forward of
an evaluation as one.

Where a step is thousands of small kernels, launching them one by one takes longer than running
them. Everything that changes from one nano-batch to the next is read from tensors that stay where
they are: tokens, positions, boundaries, work lists, pools. So a graph serves whatever jobs are
attached; it is captured anew only for another shape, or when a pool has moved. The head and the
loss, whose size is the number of trained tokens, run outside.

A shape is captured once it has been seen to wait for its launches (launches.py); the runs before
that are ordinary ones, so nothing is computed that is not used.
"""

import logging
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import nn

from tlora.model.launches import Launches
from tlora.model.packing import PackedBatch

logger = logging.getLogger(__name__)

MOST_GRAPHS = 32
"""Of training, and as many without gradients: neither takes the other's place."""

MOST_CAPTURES = 512
"""In a run: jobs whose shapes never come back are not worth more."""

MOST_RELEASES = 3
"""In a run: graphs that are in the way again and again are not worth their memory."""

Backbone = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(input_ids, position_ids) to hidden states [T, width]."""


@dataclass(slots=True)
class Backward:
    d_hidden: torch.Tensor
    graph: torch.cuda.CUDAGraph


@dataclass(slots=True)
class Captured:
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    hidden: torch.Tensor
    forward: torch.cuda.CUDAGraph
    backward: Backward | None
    """In training."""


class Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor: torch.Tensor, captured: Captured) -> torch.Tensor:
        captured.forward.replay()
        ctx.captured = captured
        return captured.hidden.detach()

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple[None, None]:
        backward = ctx.captured.backward
        backward.d_hidden.copy_(gradients[0])
        backward.graph.replay()
        return None, None


class Graphs:
    """Belongs to one super-model on one CUDA device."""

    def __init__(self, backbone: Backbone, embeddings: nn.Module, device: torch.device) -> None:
        self.captures = 0
        """So far."""

        self.settled = False
        """The last nano-batch ran as its shape always will: it is captured, or will not be."""

        self._releases = 0
        self._stopped = False
        self._backbone = backbone
        self._embeddings = embeddings
        self._device = device
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._captured: dict[Hashable, Captured] = {}
        self._launches: dict[Hashable, Launches] = {}
        self._running: tuple[Launches, float, torch.cuda.Event] | None = None
        self._measured: list[tuple[Launches, float, torch.cuda.Event, torch.cuda.Event]] = []

    def hidden(self, batch: PackedBatch, key: Hashable) -> torch.Tensor:
        """Of a nano-batch in training, or without gradients; `key` is all that decides which
        kernels run, that included."""
        captured = self._captured.pop(key, None)
        self.settled = captured is not None
        if captured is None and self._is_due(key):
            captured = self._try_capture(batch, key)
        if captured is None:
            self.settled = not self._start_clock(key, batch.num_rows)
            return self._backbone(batch.input_ids, batch.position_ids)
        # The last one used is the last to go.
        self._captured[key] = captured
        captured.input_ids.copy_(batch.input_ids)
        captured.position_ids.copy_(batch.position_ids)
        if captured.backward is None:
            captured.forward.replay()
            return captured.hidden
        return Replay.apply(self._anchor, captured)

    def begin(self) -> None:
        """Another nano-batch: a clock that an error left running means nothing."""
        self._running = None

    def launched(self) -> None:
        """Forward and backward of the nano-batch are under way."""
        if self._running is None:
            return
        launches, started, first = self._running
        last = torch.cuda.Event(enable_timing=True)
        last.record()
        self._measured.append((launches, time.perf_counter() - started, first, last))
        self._running = None

    def forget(self) -> None:
        """Free the graphs' memory; shapes are captured again when they come back."""
        if self._captured:
            # The last one may still be running.
            torch.cuda.synchronize()
        self._captured.clear()
        # A pool of memory whose graphs are all gone cannot be used again.
        self._pool = torch.cuda.graph_pool_handle()

    def release(self) -> bool:
        """Memory is short: give the graphs' back; whether they had any."""
        held = bool(self._captured)
        if held:
            self.forget()
            self._releases += 1
            self._stopped = self._stopped or self._releases >= MOST_RELEASES
        return held

    def give_up(self, key: Hashable) -> None:
        """Never capture this shape."""
        self._launches[key] = Launches(seconds=[(0.0, 1.0)] * 2)

    def _start_clock(self, key: Hashable, rows: int) -> bool:
        """Unless the shape is decided already."""
        launches = self._launches.setdefault(key, Launches(torch.is_grad_enabled(), rows))
        if launches.decided or self._stopped:
            return False
        # A device with work left would hold the host up, and what is measured is the host.
        torch.cuda.synchronize()
        first = torch.cuda.Event(enable_timing=True)
        first.record()
        self._running = (launches, time.perf_counter(), first)
        return True

    def _is_due(self, key: Hashable) -> bool:
        for launches, host, first, last in self._measured:
            # Of a nano-batch before this one; only until its shape is decided.
            last.synchronize()
            launches.add(host, first.elapsed_time(last) / 1e3)
        self._measured.clear()
        launches = self._launches.get(key)
        if launches is None or self._stopped:
            return False
        return launches.bound_among(self._launches.values())

    def _try_capture(self, batch: PackedBatch, key: Hashable) -> Captured | None:
        trains = torch.is_grad_enabled()
        alike = [
            each
            for each, captured in self._captured.items()
            if (captured.backward is not None) == trains
        ]
        if len(alike) >= MOST_GRAPHS:
            del self._captured[alike[0]]
        captured = None
        try:
            captured = self._capture(batch)
        except Exception as error:
            # Whatever a model does that cannot be captured, it still runs as before.
            logger.info("a nano-batch of %d rows is not captured: %s", batch.num_rows, error)
        if captured is None:
            # The error held on to what was captured.
            self.give_up(key)
            if not self._captured:
                self._pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()
            return None
        self.captures += 1
        if self.captures >= MOST_CAPTURES and not self._stopped:
            self._stopped = True
            logger.info("%d nano-batches were captured: no more shapes are", self.captures)
        return captured

    def _capture(self, batch: PackedBatch) -> Captured:
        input_ids, position_ids = batch.input_ids.clone(), batch.position_ids.clone()
        embedded: list[torch.Tensor] = []

        def require(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
            # What backward runs towards: a leaf of the pool lives outside of the capture.
            embedded.append(output.requires_grad_(torch.is_grad_enabled()))
            return output

        forward = torch.cuda.CUDAGraph()
        hook = self._embeddings.register_forward_hook(require)
        try:
            with self._capturing(forward):
                hidden = self._backbone(input_ids, position_ids)
        finally:
            hook.remove()
        backward = self._capture_backward(hidden, embedded[0]) if hidden.requires_grad else None
        return Captured(input_ids, position_ids, hidden.detach(), forward, backward)

    def _capture_backward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> Backward:
        d_hidden, graph = torch.zeros_like(hidden), torch.cuda.CUDAGraph()
        with self._capturing(graph):
            torch.autograd.grad(hidden, embedded, d_hidden)
        return Backward(d_hidden, graph)

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        # Other threads may copy states meanwhile, and allocate for it. Backward runs in a thread of
        # its own, which captures because its stream does.
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        # torch leaves the stream of a capture that it cannot begin or end as the current one: all
        # that follows would run on it, in no order with what other threads do.
        with torch.cuda.stream(self._stream):
            capture.__enter__()
            try:
                yield
            finally:
                try:
                    capture.__exit__(None, None, None)
                except Exception:
                    self._abandon()
                    raise

    def _abandon(self) -> None:
        """A capture that met what cannot be captured cannot be ended either, and takes its memory
        along: no more shapes are. torch before 2.12 believes that it goes on, and as long frees no
        memory at all."""
        self._stopped = True
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
