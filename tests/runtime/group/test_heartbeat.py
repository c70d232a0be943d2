"""What a rank says of itself, and what it does when another is silent; without processes."""

import os
import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tlora.runtime.group import heartbeat
from tlora.runtime.group.heartbeat import ENDED, Heartbeat
from tlora.runtime.listening import Listener


@pytest.fixture
def store(monkeypatch) -> dist.Store:
    """That all ranks meet at; they need not wait for each other, and beat when told to."""
    found = dist.HashStore()
    monkeypatch.setattr(heartbeat, "_store", lambda: found)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    return found


def beating(lost: Callable[[str], None] = lambda cause: None) -> Heartbeat:
    return Heartbeat(0, 2, name="g", lost=lost)


def test_a_rank_that_has_ended_says_no_more(store) -> None:
    """A beat that was under way when it was closed would look as if it had gone silent; before
    that, beats are told."""
    rank = beating()
    said = rank._store.get("0")
    rank._beat()
    assert rank._store.get("0") != said
    rank.close()
    rank._beat()
    assert rank._store.get("0").decode() == ENDED


class Left(BaseException):
    """Instead of the end of this process."""


def test_a_note_that_cannot_be_written_does_not_keep_a_rank_from_ending(store, monkeypatch) -> None:
    """A full disk: the process ends all the same, and not if it is closed meanwhile."""

    def full(cause: str) -> None:
        raise OSError(28, "No space left on device")

    def leave(code: int) -> None:
        raise Left(code)

    def closed_meanwhile(cause: str) -> None:
        rank.close()
        full(cause)

    monkeypatch.setattr(os, "_exit", leave)
    for name in ("GRACE_S", "BEAT_S"):
        monkeypatch.setattr(heartbeat, name, 0.0)
    for lost, end in ((full, Left), (closed_meanwhile, OSError)):
        rank = beating(lost)
        rank._seen_at -= 2 * heartbeat.HANG_S
        with pytest.raises(end):
            rank._keep_watch()


def test_a_rank_that_was_stopped_itself_takes_nobody_for_lost(store, monkeypatch) -> None:
    """All of them were, most often. Who is silent after that is lost all the same."""
    now, looks, causes = [0.0], [], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(heartbeat, "Listener", lambda: Listener(lambda: now[0]))
    rank = beating(causes.append)
    minute = iter([0.25, 60.0, *[0.25] * 40])

    def ended() -> None:
        raise Left

    def passes(seconds: float) -> bool:
        now[0] += next(minute)
        looks.append(now[0])
        return False

    monkeypatch.setattr(rank._closed, "wait", passes)
    monkeypatch.setattr(rank, "_end", ended)
    monkeypatch.setattr(rank, "_kill_watched", lambda: None)
    with pytest.raises(Left):
        rank._keep_watch()
    assert 60.25 + heartbeat.HANG_S - 0.5 <= looks[-1] <= 60.25 + heartbeat.HANG_S + 0.5
    assert len(causes) == 1
