"""How the threads of this process wait for each other while other processes want the cores too.

A nano-batch on a CPU is a thousand and more short pieces of work that are cut over the threads of
OpenMP. The thread that is through first spins, some milliseconds of it in libgomp: on cores of
one's own nothing is faster, for waking a thread takes longer than most pieces. But where the one
that is waited for has lost its core to another process, every piece costs a spin or a time slice,
and training all but stands still. A shorter spin is no way out (docs/log.md, 2026-11-18).

libgomp itself spins hardly at all while there are more threads of OpenMP in a process than cores,
as its manual says under GOMP_SPINCOUNT. So as long as others want the cores, threads that do
nothing have teams of their own here. The number of threads that work is the same, and so are the
bits. Another OpenMP has idle threads of it, and no gain.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tlora.runtime.environment import allowed_cores, busy_seconds, waiting_is_chosen

LOOK_S = 0.25
"""A clock tick of 10 ms is 4 % of a core; importing torch keeps a core busy for 2 s and more."""

WANTED_CORES = 0.5
"""Of others, beyond the cores that are left to them. One busy process gets 0.7 of a core beside
two threads that spin on two cores."""

LEFT_CORES = 0.2
"""Fewer than these, and they are gone."""

CUT_ELEMENTS = 1 << 17
"""torch cuts an addition of so many over threads: it does from 32,768 on."""


@dataclass(frozen=True, slots=True)
class Look:
    """Seconds so far."""

    wall: float
    own: float
    """Of all threads of this process, on any core."""

    busy: float
    """Of all cores that it may run on, whoever kept them so."""


def is_crowded(before: Look, now: Look, *, threads: int, cores: int, already: bool) -> bool:
    """Whether others want cores that the threads need, `already` or not yet."""
    others = (now.busy - before.busy) - (now.own - before.own)
    wanted = threads + others / (now.wall - before.wall) - cores
    return wanted > (LEFT_CORES if already else WANTED_CORES)


def teams_needed(*, threads: int, cores: int) -> int:
    """Each adds its threads but the one it belongs to; with all there are more than cores."""
    return max(0, cores - threads) // (threads - 1) + 1


@contextmanager
def giving_way(device: torch.device) -> Iterator[None]:
    """While others want the cores, this process's threads sleep where they would spin. A person
    who says how threads wait is obeyed."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1 or waiting_is_chosen() or look() is None:
        yield
        return
    over = threading.Event()
    watcher = threading.Thread(target=watch, args=(over, threads), name="giving-way", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def look() -> Look | None:
    busy = busy_seconds()
    return None if busy is None else Look(time.monotonic(), time.process_time(), busy)


def watch(over: threading.Event, threads: int) -> None:
    """In a thread of its own: a nano-batch that stalls must not have to end first."""
    cores = allowed_cores()
    teams = Teams(teams_needed(threads=threads, cores=cores))
    before = look()
    try:
        while not over.wait(LOOK_S):
            now = look()
            if before is not None and now is not None:
                already = teams.are_there
                crowded = is_crowded(before, now, threads=threads, cores=cores, already=already)
                if crowded and not already:
                    teams.come()
                elif already and not crowded:
                    teams.leave()
            before = now
    finally:
        teams.leave()


class Teams:
    """Threads that do nothing, each with threads of OpenMP that do nothing."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._enough = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def are_there(self) -> bool:
        return bool(self._threads)

    def come(self) -> None:
        self._enough = threading.Event()
        self._threads = [
            threading.Thread(target=idle_with_team, args=(self._enough,), daemon=True)
            for _ in range(self.count)
        ]
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        """A thread that ends takes its team with it."""
        self._enough.set()
        for thread in self._threads:
            thread.join()
        self._threads = []


def idle_with_team(enough: threading.Event) -> None:
    torch.zeros(CUT_ELEMENTS).add_(1.0)
    enough.wait()
