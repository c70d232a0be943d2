"""How ranks leave their group: watched until all are through, together where one breaks, and not
with a job whose state is on no disk."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from support.waiting import until

from tlora.core.errors import TloraError
from tlora.core.plan import Plan
from tlora.runtime.elastic.roll import Again
from tlora.runtime.group import as_rank, heartbeat
from tlora.runtime.group.heartbeat import Heartbeat
from tlora.runtime.group.rank import Member
from tlora.runtime.group.supervisor import hold_port
from tlora.runtime.saving import SaveFailed
from tlora.training.driver import Status


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch):
    """Two ranks that beat in this process, twenty times a second; what each says of the other, and
    how often one of them has left at once. A thread may have to wait long for its turn, and a rank
    that is taken for lost is killed, which would be the tests' own process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    for name, seconds in (("BEAT_S", 0.05), ("HANG_S", 300.0), ("GRACE_S", 0.05)):
        monkeypatch.setattr(heartbeat, name, seconds)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    said: list[str] = []
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    beats = [Heartbeat(rank, 2, name="pair", lost=said.append) for rank in (0, 1)]
    yield beats, said, left
    for each in beats:
        each.close()


def test_a_rank_that_broke_takes_the_others_with_it(pair) -> None:
    """Sooner than silence would be noticed, and without another cause than its own."""
    (first, _), said, left = pair
    first.close(broken=True)
    until(lambda: left)
    assert left == [1] and said == []


def test_a_rank_that_has_ended_well_takes_nobody_with_it(pair) -> None:
    """It is silent for longer than a rank that hangs may be."""
    (first, second), said, left = pair
    first.close()
    until(lambda: second._seen == heartbeat.ENDED)
    second._seen_at -= 2 * heartbeat.HANG_S
    beats = second._beats
    until(lambda: second._beats >= beats + 5)
    assert left == [] and said == []


@pytest.mark.parametrize("fault", ["", "training", "barrier", "other"])
def test_a_rank_is_watched_until_all_have_come_to_the_end(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last barrier is a collective as any other: a rank may be lost while others wait in it.
    One that breaks because another did says so in a line."""
    seen: list[str] = []

    def step(name: str):
        def taken(*about, **settings):
            seen.append(name)
            if name == fault:
                raise OSError("a cable was pulled")
            if name == "training" and fault == "other":
                raise RuntimeError("gloo: Connection closed by peer\nand much more")

        return taken

    class Beats:
        def __init__(self, *about, **settings) -> None:
            self.closed = False

        def close(self, *, broken: bool = False) -> None:
            seen.extend(() if self.closed else ("broken" if broken else "ended",))
            self.closed = True

    whole = SimpleNamespace(lost=lambda cause: seen.append(cause))
    monkeypatch.setattr(as_rank, "join", lambda asked: None)
    monkeypatch.setattr(as_rank, "check_runs", lambda plan, world: None)
    monkeypatch.setattr(as_rank, "compare", lambda plan, attempt: ("name", True))
    monkeypatch.setattr(as_rank, "Whole", lambda *about, **settings: whole)
    monkeypatch.setattr(as_rank, "Heartbeat", Beats)
    monkeypatch.setattr(as_rank, "train_together", step("training"))
    for name, answer in (("get_rank", 0), ("get_world_size", 2)):
        monkeypatch.setattr(dist, name, lambda answer=answer: answer)
    monkeypatch.setattr(dist, "barrier", step("barrier"))
    monkeypatch.setattr(dist, "destroy_process_group", step("left"))
    spec = SimpleNamespace(engine=SimpleNamespace(device="cpu"))
    arguments = {"output": tmp_path, "plan": Plan(bucket=64, replicas=2), "again": Again()}
    if not fault:
        as_rank.train_as_rank(spec, **arguments)  # type: ignore[arg-type]
        assert seen == ["training", "barrier", "ended", "left"]
        return
    if fault == "other":
        with pytest.raises(TloraError, match=r"lost the others \(.* closed by peer\); "):
            as_rank.train_as_rank(spec, **arguments)  # type: ignore[arg-type]
        assert seen == ["training", "broken"]
        return
    with pytest.raises(OSError, match="cable"):
        as_rank.train_as_rank(spec, **arguments)  # type: ignore[arg-type]
    assert seen[-2:] == ["rank 0: OSError: a cable was pulled", "broken"]


@pytest.mark.parametrize("full", [False, True])
def test_a_job_that_cannot_be_saved_does_not_move(full: bool) -> None:
    """It stops where it is, by name: elsewhere it would go on from an older step. Another job whose
    checkpoint failed meanwhile stops too."""
    drivers = {
        name: SimpleNamespace(name=name, step=7, status=Status.RUNNING, reason=None)
        for name in ("moving", "other")
    }
    moved: list[str] = []

    class Recorder:
        sinks = SimpleNamespace(close=lambda name, status: None)

        def save(self, saved):
            return [SaveFailed(name, "the disk is full") for name in drivers] if full else []

        def pause(self, failure: SaveFailed) -> None:
            drivers[failure.job].status = Status.PAUSED

    member = Member.__new__(Member)
    member.rank = 0
    member.recorder = Recorder()  # type: ignore[assignment]
    member.directory = SimpleNamespace(event=lambda kind, **fields: None)  # type: ignore[assignment]
    member.tell = lambda message: None
    loop = SimpleNamespace(active=drivers, leave=moved.append)
    assert member._send_off(loop, "moving", 1) is not full  # type: ignore[arg-type]
    assert moved == ([] if full else ["moving"])
    expected = Status.PAUSED if full else Status.RUNNING
    assert {each.status for each in drivers.values()} == {expected}


def test_the_port_that_ranks_will_meet_at_is_given_to_nobody_else() -> None:
    """Nor is it in the way of who listens there; one that was only looked for is anybody's."""
    held = hold_port()
    port = held.getsockname()[1]
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store.set("met", "here")
    held.close()
    assert store.get("met") == b"here"
