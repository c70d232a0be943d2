"""Ranks without a supervisor: each beats once a second, and each looks whether the next one does.

A launcher such as torchrun sees a process that ends, not one that hangs; the others would wait for
it in a collective until that times out. Beats go through the store that the ranks met at. Each rank
looks at one other, so that it costs the same for any number; a rank whose neighbour hangs too is
looked at by the one before. Ranks that are stopped together and let go on, as by a container that
is paused, lose none: time in which a rank itself was away does not count.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from tlora.runtime.group.supervisor import GRACE_S, HANG_S
from tlora.runtime.listening import BEAT_S, Listener

ENDED = "ended"
BROKEN = "broken"
"""What a rank says last, in place of a beat."""


class Heartbeat:
    """Of this rank, from when all have joined until it is closed."""

    def __init__(self, rank: int, world: int, *, name: str, lost: Callable[[str], None]) -> None:
        """`name` is the group's, and no other's that met at the same store. `lost` is told the
        cause when the next rank is taken for lost; then this process ends, and with it the group.
        Returns when all ranks beat."""
        self._store = dist.PrefixStore(f"tlora/beats/{name}", _store())
        self._rank = rank
        self._watched = (rank + 1) % world
        self._lost = lost
        self._closed = threading.Event()
        self._lock = threading.Lock()
        """Nothing is said after the end: it would look as if this rank had gone silent."""

        self._beats = 0
        self._seen, self._seen_at = "", time.monotonic()
        """The last beat of the other, and when it came, by this rank's clock."""

        self._came = time.monotonic()
        """When the store last answered."""

        self._beat()
        dist.barrier()
        for work in (self._keep_beating, self._keep_watch):
            threading.Thread(target=work, name="heartbeat", daemon=True).start()

    def close(self, *, broken: bool = False) -> None:
        """This rank has nothing left to do with the others; or it broke, and they end as well: a
        collective may wait for it without an end."""
        with self._lock:
            if not self._closed.is_set():
                self._closed.set()
                with suppress(RuntimeError):
                    self._store.set(str(self._rank), BROKEN if broken else ENDED)

    def _keep_beating(self) -> None:
        while not self._closed.wait(BEAT_S):
            # A store that is gone does not answer, and that is seen by who keeps watch.
            with suppress(RuntimeError):
                self._beat()
                self._look()

    def _beat(self) -> None:
        with self._lock:
            if not self._closed.is_set():
                self._beats += 1
                place = f"{socket.gethostname()} {os.getpid()} {self._beats}"
                self._store.set(str(self._rank), place)

    def _look(self) -> None:
        found = self._store.get(str(self._watched)).decode()
        self._came = time.monotonic()
        if found != self._seen:
            self._seen, self._seen_at = found, self._came

    def _keep_watch(self) -> None:
        listener = Listener()
        while not self._closed.wait(BEAT_S / 4):
            away = listener.away_s()
            self._seen_at, self._came = self._seen_at + away, self._came + away
            if self._seen == ENDED:
                continue
            if self._seen == BROKEN:
                # It has said why.
                self._end()
                continue
            silent = time.monotonic() - min(self._seen_at, self._came)
            if silent > HANG_S:
                try:
                    self._say(silent)
                finally:
                    self._end()

    def _end(self) -> None:
        # Where connections are cut by that, this rank's own collective fails, and what it has is
        # saved.
        if not self._closed.wait(GRACE_S):
            self.close(broken=True)
            os._exit(1)

    def _say(self, silent: float) -> None:
        if time.monotonic() - self._came > HANG_S / 2:
            self._lost(f"the store that ranks meet at has not answered for {silent:.0f} seconds")
        else:
            self._lost(f"rank {self._watched}: it has not been heard of for {silent:.0f} seconds")
            self._kill_watched()

    def _kill_watched(self) -> None:
        """A launcher waits long for a process that is stopped, where it can be reached."""
        host, number, _ = self._seen.split(" ")
        if host == socket.gethostname():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(number), signal.SIGKILL)


def _store() -> dist.Store:
    """A connection of its own: threads of one rank would wait for each other."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=HANG_S),
    )
