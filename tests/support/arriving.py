"""Jobs that are held on their way into an engine, each in the thread that brings it."""

import threading
import weakref

import pytest

from support.waiting import PATIENCE_S, until
from tlora.model.adapter_rows import AdapterRows
from tlora.runtime import arriving

WORK = ("arrival of ", "data of newcomers")
"""What threads that bring jobs are called."""


class Gate:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, *jobs: str) -> None:
        """Jobs of other names are not held."""
        self._gates = {job: threading.Event() for job in jobs}
        self.reached: list[str] = []
        resumption = arriving.resumption

        def held(directory, job):
            if job.name in self._gates:
                self.reached.append(job.name)
                wait_held(self._gates[job.name])
            return resumption(directory, job)

        monkeypatch.setattr(arriving, "resumption", held)

    def let_in(self, *jobs: str) -> None:
        for job in jobs or self._gates:
            self._gates[job].set()


def rows_were_waiting(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each job that is attached from here on, whether its rows were kept for it."""
    found: list[bool] = []
    own = AdapterRows._take_kept

    def take_kept(rows, weights, moments):
        slots, entry = own(rows, weights, moments)
        found.append(slots is not None and entry is not None)
        return slots, entry

    monkeypatch.setattr(AdapterRows, "_take_kept", take_kept)
    return found


def what_is_brought(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """The matrices, moments and rows that jobs come with from here on. On a device all of it takes
    the room of nano-batches."""
    found: list[weakref.ref] = []
    own = arriving.Arrived

    def arrived(*about):
        made = own(*about)
        found.extend(weakref.ref(each) for pair in made.start.values() for each in (pair.a, pair.b))
        if made.brought.checkpoint is not None:
            moments = made.brought.checkpoint.state.moments.values()
            found.extend(weakref.ref(each) for kind in moments for each in kind.values())
        found.extend([weakref.ref(made.berth)] if made.berth is not None else [])
        return made

    monkeypatch.setattr(arriving, "Arrived", arrived)
    return found


_held: dict[threading.Thread, threading.Event] = {}


def wait_held(opened: threading.Event) -> None:
    """In a thread that brings a job: until it may go on."""
    _held[threading.current_thread()] = opened
    opened.wait(PATIENCE_S)
    del _held[threading.current_thread()]


def let_others_arrive() -> None:
    """Whoever is on its way comes as far as it can: to where it is held, or all the way. How fast
    threads are beside each other is the machine's matter, and decides nothing then."""

    def is_held(thread: threading.Thread) -> bool:
        opened = _held.get(thread)
        return opened is not None and not opened.is_set()

    until(lambda: all(is_held(thread) for thread in bringing()))


def bringing() -> list[threading.Thread]:
    """The threads that bring jobs."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(WORK)]
