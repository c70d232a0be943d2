"""A snapshot holds what was there when it was taken, and nobody waits for it who need not."""

import threading
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from support.tiny import Fed, batches, drive, tiny_engine
from support.transfers import SlowLink
from torch.utils._python_dispatch import TorchDispatchMode

from tlora.model.adapter_rows import AdapterRows
from tlora.model.cuda_link import CudaLink
from tlora.model.snapshot import AtOnce, InBackground, Snapshot
from tlora.training import moving
from tlora.training.engine import Engine
from tlora.training.engine_job import JobState


def tensors() -> list[torch.Tensor]:
    """Rows of larger ones, as a pool has them."""
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(7, width, generator=generator) for width in (3, 11, 4, 1)]
    return [whole[2:5] for whole in wholes]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("slab_bytes", [4, 100, 10_000])
def test_later_changes_do_not_reach_it(slab_bytes: int) -> None:
    """Taken, then the rows change, then the copy begins."""
    link, rows = SlowLink(), tensors()
    courier = InBackground(link, slab_bytes=slab_bytes)
    expected = [each.clone() for each in rows]
    snapshot = courier.take(rows, list)
    for each in rows:
        each.add_(1.0)
    assert not snapshot.done
    link.gate.set()
    assert same(snapshot.result(), expected) and snapshot.done
    assert not same(snapshot.result(), rows)
    assert snapshot.num_bytes == link.asked[0] == sum(4 * each.numel() for each in rows)


def test_without_room_it_is_whole_before_anything_goes_on() -> None:
    """Nothing is copied on the device; `take` returns when the host has it."""
    link, rows = SlowLink(room=False), tensors()
    link.gate.set()
    expected = [each.clone() for each in rows]
    snapshot = InBackground(link).take(rows, list)
    assert snapshot.done
    for each in rows:
        each.add_(1.0)
    assert same(snapshot.result(), expected)


def test_running_out_of_memory_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the link thought; another error is not taken for it."""

    def full(*size, device=None, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def broken(*size, device=None, **options):
        raise RuntimeError("CUDA error: an illegal memory access")

    empty, link, rows = torch.empty, SlowLink(), tensors()
    link.gate.set()

    def once(error):
        def maybe(*size, device=None, **options):
            return error() if device is not None else empty(*size, **options)

        return maybe

    monkeypatch.setattr(torch, "empty", once(full))
    snapshot = InBackground(link).take(rows, list)
    assert snapshot.done and same(snapshot.result(), rows)
    brought = InBackground(link).bring(rows, list)
    assert brought.done and same(brought.result(), rows)
    monkeypatch.setattr(torch, "empty", once(broken))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        InBackground(link).take(rows, list)


def test_what_goes_wrong_on_the_way_is_raised_by_the_result() -> None:
    """To whoever wants it, and the next one arrives."""
    link = SlowLink()
    link.gate.set()
    courier = InBackground(link)

    def lost(copies: list[torch.Tensor]) -> None:
        raise MemoryError("none left")

    snapshot = courier.take(tensors(), lost)
    with pytest.raises(MemoryError, match="none left"):
        snapshot.result()
    assert same(courier.take(tensors(), list).result(), tensors())


def test_whoever_copies_has_entered_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of its own for each way, once. On a machine with several, each would take memory of
    the first otherwise."""
    current, device = list[torch.device](), torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    CudaLink(device).enter()
    assert current == [device]
    link = SlowLink()
    link.gate.set()
    courier = InBackground(link)
    for _ in range(2):
        assert same(courier.take(tensors(), list).result(), tensors())
        assert same(courier.bring(tensors(), list).result(), tensors())
    assert len(set(link.entered)) == len(link.entered) == 2


def test_nothing_is_made_before_somebody_asks() -> None:
    """Then once, whoever asks how often; an error is told to each of them."""
    link = SlowLink()
    link.gate.set()
    courier, made = InBackground(link), []

    def counted(copies: list[torch.Tensor]) -> list[torch.Tensor]:
        made.append(len(copies))
        return copies

    def fails(copies: list[torch.Tensor]) -> None:
        made.append(0)
        raise ValueError("no")

    snapshot, broken = courier.take(tensors(), counted), courier.take(tensors(), fails)
    courier._out.submit(lambda: None).result()
    assert snapshot.done and broken.done and not made
    assert snapshot.result() is snapshot.result() and made == [4]
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            broken.result()
    assert made == [4, 0]


def test_who_comes_does_not_wait_for_who_goes() -> None:
    """Each way has a thread."""
    link = SlowLink()
    courier, shut = InBackground(link), link.gate
    going = courier.take(tensors(), list)
    link.gate = threading.Event()
    link.gate.set()
    assert same(courier.bring(tensors(), list).result(), tensors())
    assert not going.done
    shut.set()
    assert same(going.result(), tensors())


def test_the_copies_on_the_device_are_let_go_one_by_one() -> None:
    """When the value is there, nothing of the clones is."""
    link, kept = SlowLink(), []
    courier = InBackground(link, slab_bytes=40)
    clones = courier._cloned

    def watched(sources: list[torch.Tensor]) -> list[list[torch.Tensor]] | None:
        slabs = clones(sources)
        assert slabs is not None
        kept.extend(weakref.ref(slab[0].untyped_storage()) for slab in slabs)
        return slabs

    courier._cloned = watched  # type: ignore[method-assign]
    snapshot = courier.take(tensors(), list)
    link.gate.set()
    snapshot.result()
    courier._out.submit(lambda: None).result()
    assert len(kept) > 1 and not any(storage() for storage in kept)


# Jobs.


def in_background(engine: Engine) -> SlowLink:
    """An engine on the CPU whose courier is a device's."""
    link = SlowLink(staging=77)
    engine.super_model.adapter_rows.courier = InBackground(link, slab_bytes=1_000)
    return link


def same_state(found: JobState, expected: JobState) -> bool:
    def tensors(state: JobState) -> dict[str, torch.Tensor]:
        pairs = state.weights.items()
        return (
            {f"a {path}": pair.a for path, pair in pairs}
            | {f"b {path}": pair.b for path, pair in pairs}
            | {f"m {name}": each for name, each in state.exp_avg.items()}
            | {f"v {name}": each for name, each in state.exp_avg_sq.items()}
        )

    left, right = tensors(found), tensors(expected)
    return (
        found.step == expected.step
        and left.keys() == right.keys()
        and all(torch.equal(left[name], right[name]) for name in left)
    )


@pytest.mark.parametrize("leaves", [False, True])
def test_a_jobs_snapshot_is_its_state_of_then(leaves: bool) -> None:
    """Weights, moments and step, to the bit, although the job trains on, or leaves, before it is
    copied."""
    engine = tiny_engine()
    job, other = Fed("job", batches(1, [4] * 4)), Fed("other", batches(2, [4] * 6), rank=3)
    for each in (job, other):
        each.attach(engine)
    outcomes = drive(engine, [job, other])
    while len(job.steps) < 2:
        next(outcomes)
    expected = engine.state("job")
    link = in_background(engine)
    snapshot = engine.snapshot("job")
    if leaves:
        engine.detach("job")
    list(outcomes)
    assert not snapshot.done
    link.gate.set()
    assert same_state(snapshot.result(), expected)
    if not leaves:
        assert not same_state(engine.state("job"), expected)


def test_a_job_that_was_brought_goes_on_exactly() -> None:
    """Out by a snapshot and into another engine by `bring`: the bits of one that stayed."""

    def made() -> Fed:
        return Fed("job", batches(1, [5, 4, 6, 3]), dropout=0.1)

    stayed, engine = made(), tiny_engine()
    stayed.attach(engine)
    list(drive(engine, [stayed]))
    job, first, second = made(), tiny_engine(), tiny_engine()
    for each in (first, second):
        in_background(each).gate.set()
    job.attach(first)
    for _ in drive(first, [job]):
        if len(job.steps) == 2:
            break
    snapshot = first.snapshot("job")
    first.detach("job")
    state = moving.bring(second.super_model, "job", snapshot.result()).result()
    job.attach(second, weights=state.weights, state=state)
    list(drive(second, [job]))
    assert job.losses == stayed.losses
    assert same_state(second.state("job"), engine.state("job"))


def test_an_adapter_that_was_brought_is_the_adapter() -> None:
    """By path, to the bit."""
    engine = tiny_engine()
    in_background(engine).gate.set()
    weights = engine.super_model.new_adapter(Fed("job", []).spec)
    brought = moving.bring_weights(engine.super_model, "job", weights).result()
    assert brought.keys() == weights.keys()
    for path, pair in brought.items():
        assert pair.a is not weights[path].a
        assert torch.equal(pair.a, weights[path].a) and torch.equal(pair.b, weights[path].b)


def test_in_host_memory_a_snapshot_is_there_at_once() -> None:
    """A copy all the same; and nothing has to be brought."""
    rows = tensors()
    snapshot = AtOnce().take(rows, list)
    assert snapshot.done and same(snapshot.result(), rows)
    rows[0].add_(1.0)
    assert not same(snapshot.result(), rows)
    assert AtOnce().bring(rows, list).result()[0] is rows[0]
    assert Snapshot.of(3).result() == 3


# Launches.

VIEWS = {"detach", "slice", "view", "permute", "t", "transpose", "split_with_sizes", "empty"}


class Launches(TorchDispatchMode):
    """Counts what a device would have to do."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function._schema.name.removeprefix("aten::")
        if name not in VIEWS:
            self.counts[name] += 1
        return function(*arguments, **(options or {}))


def launches(action: Callable[[], object]) -> dict[str, int]:
    with Launches() as mode:
        action()
    return dict(mode.counts)


def test_a_job_comes_and_goes_by_a_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its rows at once, whatever their number."""
    engine = tiny_engine()
    # What lies on a device is not looked at again; this one lies in host memory.
    monkeypatch.setattr(AdapterRows, "check_numbers", lambda *_: None)
    in_background(engine).gate.set()
    weights = engine.super_model.new_adapter(Fed("job", []).spec)
    there = moving.bring_weights(engine.super_model, "job", weights).result()
    attach = launches(lambda: engine.attach("job", there, scale=2.0))
    assert attach == {"_foreach_copy_": 1}
    assert launches(lambda: engine.snapshot("job")) == {"_foreach_copy_": 1}
    assert launches(lambda: engine.detach("job")) == {"_foreach_zero_": 1}
    assert len(weights) == 14
    one_by_one = launches(lambda: [pair.a.clone() for pair in weights.values()])
    assert sum(one_by_one.values()) == 14, "it can count"
