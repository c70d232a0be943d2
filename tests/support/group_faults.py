"""Ranks that are lost: a process with a fault in it, or one that is sent a signal."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tlora.runtime.group import supervisor
from tlora.runtime.group.supervisor import Ranks

serve = supervisor.serve


def raising(connection, directory, plan, jobs, rank, *more: Any) -> None:
    """Rank 1 of two raises at its sixth agreement."""
    from tlora.training.group_engine import GroupEngine

    agree, turns = GroupEngine._agree, [0]

    def failing(self):
        turns[0] += 1
        if rank == 1 and plan["replicas"] * plan["fsdp"] == 2 and turns[0] == 6:
            raise OSError("a cable was pulled")
        return agree(self)

    GroupEngine._agree = failing
    serve(connection, directory, plan, jobs, rank, *more)


def lose(when: Path, number: int, rank: int, lost: list[float]) -> Callable[[Ranks], None]:
    """Send a signal to a rank of the first group once this file has some lines."""

    def watch(pid: int) -> None:
        until = time.monotonic() + 100
        while time.monotonic() < until:
            if when.exists() and len(when.read_text().splitlines()) >= 5:
                break
            time.sleep(0.05)
        lost.append(time.time())
        os.kill(pid, number)

    def on_start(ranks: Ranks) -> None:
        if not lost and len(ranks.pids) == 2:
            threading.Thread(target=watch, args=(ranks.pids[rank],), daemon=True).start()

    return on_start
