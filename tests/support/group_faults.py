"""Ranks that are lost: a process with a fault in it, or one that is sent a signal."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.waiting import until
from tlora.runtime.group import supervisor
from tlora.runtime.group.supervisor import Ranks

serve = supervisor.serve

MOVE_TOKENS = 60.0
"""Far less than jobs have left to train that are to move."""


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


def quick_to_move(*arguments: Any) -> None:
    """A move costs little, however long this machine took for one job to come in."""
    from tlora.runtime.group.rank import Member

    Member._move_cost = lambda self: MOVE_TOKENS
    serve(*arguments)


def raising_after_a_move(connection, directory, plan, jobs, rank, *more: Any) -> None:
    """The rank of two that has sent a job to the other raises twenty agreements later."""
    from tlora.runtime.group.rank import Member
    from tlora.training.group_engine import GroupEngine

    agree, send_off, left = GroupEngine._agree, Member._send_off, [-1]
    Member._move_cost = lambda self: MOVE_TOKENS

    def sent(self, *move):
        left[0] = 20
        return send_off(self, *move)

    def failing(self):
        left[0] -= 1
        if left[0] == 0:
            raise OSError("a cable was pulled")
        return agree(self)

    GroupEngine._agree, Member._send_off = failing, sent
    serve(connection, directory, plan, jobs, rank, *more)


def unhurried(connection, directory, plan, jobs, rank, *more: Any, words: float = 2) -> None:
    """A group of two that takes its time until it was asked for so many things: whoever asks may be
    many seconds late."""
    from tlora.training.group_engine import GroupEngine

    agree, commands, heard, turns = GroupEngine._agree, supervisor._Line.commands, [], [0]

    def asked(self):
        found = commands(self)
        heard.extend(found)
        return found

    def slowly(self):
        turns[0] += 1
        if turns[0] > 12 and len(heard) < words:
            connection.poll(0.25)
        return agree(self)

    if rank == 0 and plan["replicas"] * plan["fsdp"] == 2:
        GroupEngine._agree, supervisor._Line.commands = slowly, asked
    serve(connection, directory, plan, jobs, rank, *more)


def unhurried_to_the_end(*arguments: Any) -> None:
    """Of the group, which is to be lost."""
    unhurried(*arguments, words=float("inf"))


def held_newcomers(connection, directory, plan, jobs, rank, *more: Any, words: float) -> None:
    """A job that comes later is held on its way: by rank 1 of two while its data are opened, until
    DIRECTORY/JOB.open exists; by whoever takes it in, until DIRECTORY/JOB.enter does; and no longer
    once it is cancelled. Files JOB.unseen and JOB.spoilt keep it out on rank 1, on either half of
    its way; with JOB.behind rank 1 sees no checkpoint. Otherwise as `unhurried`."""
    from tlora.runtime import arriving
    from tlora.runtime.group.coming import Coming, Newcomers
    from tlora.runtime.resuming import Resumption

    open_data, resumption, dismiss = Newcomers._open, arriving.resumption, Coming.dismiss

    def opened(self, name):
        if rank == 1:
            until((Path(directory) / f"{name}.open").exists)
            if (Path(directory) / f"{name}.unseen").exists():
                raise OSError("no such file on this node")
        return open_data(self, name)

    def found(run, job):
        until((Path(directory) / f"{job.name}.enter").exists)
        if rank == 1 and (Path(directory) / f"{job.name}.spoilt").exists():
            raise OSError("a disk was pulled")
        if rank == 1 and (Path(directory) / f"{job.name}.behind").exists():
            return Resumption()
        return resumption(run, job)

    def dismissed(self, *about):
        dismiss(self, *about)
        for held in ("open", "enter"):
            (Path(directory) / f"{self.name}.{held}").touch()

    Newcomers._open, arriving.resumption, Coming.dismiss = opened, found, dismissed
    unhurried(connection, directory, plan, jobs, rank, *more, words=words)


def lose(when: Path, number: int, rank: int, lost: list[float]) -> Callable[[Ranks], None]:
    """Send a signal to a rank of the first group once this file has some lines."""

    def watch(pid: int) -> None:
        wait_for_lines(when)
        lost.append(time.time())
        os.kill(pid, number)

    def on_start(ranks: Ranks) -> None:
        if not lost and len(ranks.pids) == 2:
            threading.Thread(target=watch, args=(ranks.pids[rank],), daemon=True).start()

    return on_start


def wait_for_lines(path: Path, *, lines: int = 5) -> None:
    until(lambda: path.exists() and len(path.read_text().splitlines()) >= lines)


def stop_rank(rank: int, launcher: int, *, when: Path) -> float:
    """SIGSTOP to a rank that this process started, once this file has some lines: the time."""
    wait_for_lines(when)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == launcher and f"RANK={rank}".encode() in environment:
            os.kill(int(folder.name), signal.SIGSTOP)
            return time.time()
    raise AssertionError(f"the launcher has no rank {rank}")
