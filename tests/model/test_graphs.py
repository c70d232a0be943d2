"""Nano-batches that cannot be captured run as before, and leave the device as it was. That those
which can be are the same is for a device to show (tests/gpu/test_graphs.py)."""

from collections.abc import Callable

import pytest
import torch
from support.captures import DEFAULT, Device
from support.models import packed, sequences_of
from torch import nn

from tlora.model.graphs import Graphs
from tlora.model.launches import Launches

ROWS = 8


@pytest.fixture(autouse=True)
def always_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a shape's third run on."""
    monkeypatch.setattr(Launches, "bound", property(lambda self: self.runs >= 2))


class Twice(torch.autograd.Function):
    """Something is done in backward before the gradient is given."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, before: Callable[[], None]) -> torch.Tensor:
        ctx.before = before
        return 2 * x

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        ctx.before()
        return 2 * gradients[0], None


class Model:
    def __init__(
        self,
        *,
        forward: Callable[[], None] = lambda: None,
        backward: Callable[[], None] = lambda: None,
    ) -> None:
        torch.manual_seed(0)
        self.embeddings = nn.Embedding(1024, 4)
        self.forward, self.backward = forward, backward

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(input_ids)[0]
        self.forward()
        return Twice.apply(x, self.backward)

    def graphs(self) -> Graphs:
        return Graphs(self, self.embeddings, torch.device("cpu", 0))


def run(graphs: Graphs, key: str, times: int) -> list[torch.Tensor]:
    """As a super-model does."""
    batch, hidden = packed({"a": sequences_of([ROWS], seed=0)}), list[torch.Tensor]()
    for _ in range(times):
        graphs.begin()
        hidden.append(graphs.hidden(batch, key))
        hidden[-1].sum().backward()
        graphs.launched()
    return hidden


@pytest.mark.parametrize("ends_pools", [False, True], ids=["torch 2.11", "torch 2.12"])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_model_that_waits_for_its_device_runs_as_before(
    monkeypatch: pytest.MonkeyPatch, way: str, ends_pools: bool
) -> None:
    """On the stream that it ran on, and memory can be freed. It is not tried again: what a capture
    held that cannot be ended is lost."""
    device = Device(monkeypatch, ends_pools=ends_pools)
    model = Model(**{way: device.synchronise})
    graphs = model.graphs()
    hidden = run(graphs, "a shape", 5)
    assert all(torch.equal(each, hidden[0]) and each.requires_grad for each in hidden)
    assert graphs.captures == 0 and graphs.settled
    assert device.stream is DEFAULT
    torch.cuda.empty_cache()
    users = dict(device.users)
    run(graphs, "another", 5)
    assert graphs.captures == 0 and device.users == users
    assert device.stream is DEFAULT


def test_shapes_that_were_captured_are_replayed_after_one_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch, ends_pools=False)
    model = Model()
    graphs = model.graphs()
    run(graphs, "a shape", 4)
    assert graphs.captures == 1 and device.stream is DEFAULT
    model.forward = device.synchronise
    run(graphs, "another", 4)
    captured = graphs._captured["a shape"]
    before = captured.forward.replays  # type: ignore[attr-defined]
    run(graphs, "a shape", 3)
    assert captured.forward.replays == before + 3  # type: ignore[attr-defined]
    assert graphs.captures == 1 and device.stream is DEFAULT


def test_an_error_that_ends_no_capture_keeps_no_other_shape_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Out of memory, say: the memory that was captured with is another's then."""
    device = Device(monkeypatch, ends_pools=False)

    def full() -> None:
        if device.is_capturing:
            raise torch.OutOfMemoryError("no room")

    model = Model(forward=full)
    graphs = model.graphs()
    run(graphs, "a shape", 4)
    assert graphs.captures == 0 and device.stream is DEFAULT
    (pool,) = device.users
    # Of its graphs none is left.
    device.users[pool] = 0
    model.forward = lambda: None
    run(graphs, "another", 4)
    run(graphs, "a shape", 2)
    assert graphs.captures == 1 and device.stream is DEFAULT
