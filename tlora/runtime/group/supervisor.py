"""Ranks as processes of this machine, watched: the group ends as soon as one of them is lost.

A rank beats once a second from a thread of its own. One that is killed, stops beating or raises
ends the group: the others would wait for it in their next collective. Those that can still save
their jobs get a few seconds for it.
"""

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tlora.config import load_plan
from tlora.core.plan import Plan
from tlora.runtime.executors.messages import (
    Command,
    Message,
    Noted,
    commands_of,
    encoded,
    messages_of,
)
from tlora.runtime.fork_server import fork_server
from tlora.runtime.group.plans import plan_as_json
from tlora.runtime.listening import LastHeard, Listener, Voice

HANG_S = 6.0
"""Without a beat for so long a rank is taken for lost."""

GRACE_S = 3.0
"""For the others, to save what they have. Together the group ends within ten seconds."""

BROKE = "broke"
"""What a rank notes of its own exception, in the last thing that it says."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a group ended before its jobs did."""

    rank: int
    cause: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.cause}"


class Ranks:
    """The processes of one group, from start to end."""

    def __init__(
        self, plan: Plan, directory: Path, jobs: list[str], *, threads: int | None = 1
    ) -> None:
        context = fork_server([__name__, "tlora.runtime.group.rank"])
        self._listener = Listener()
        self._meeting = hold_port()
        port = self._meeting.getsockname()[1]
        self._ranks = []
        for rank in range(plan.gpus):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(theirs, str(directory), plan_as_json(plan), jobs, rank, port, threads),
                name=f"tlora rank {rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._ranks.append(_Rank(rank, process, ours))

    @property
    def pids(self) -> list[int]:
        return [each.process.pid or 0 for each in self._ranks]

    def send(self, command: Command) -> None:
        """To all, by way of rank 0."""
        # Of one that is gone the loss is told by `watch`.
        with suppress(OSError):
            self._ranks[0].connection.send_bytes(encoded([command]))

    def watch(
        self,
        hear: Callable[[int, Message], None],
        should_stop: Callable[[], bool],
        commands: Callable[[], list[Command]] = list,
    ) -> Loss | None:
        """Until all ranks have ended: None if each of them ended well. `commands` says now and then
        what they are asked meanwhile."""
        asked = False
        while any(not each.ended for each in self._ranks):
            for command in commands():
                self.send(command)
            if should_stop() and not asked:
                asked = True
                for each in self._ranks:
                    each.signal(signal.SIGTERM)
            self._receive(0.25, hear)
            if any(each.loss for each in self._ranks):
                return self._end(hear)
        return None

    def close(self) -> None:
        for each in self._ranks:
            each.kill()
        self._meeting.close()

    def _receive(self, timeout_s: float, hear: Callable[[int, Message], None]) -> None:
        there = {each.connection: each for each in self._ranks if not each.ended}
        for connection in wait(list(there), timeout_s):
            assert isinstance(connection, Connection)
            for message in there[connection].receive():
                hear(there[connection].number, message)
        away = self._listener.away_s()
        for each in self._ranks:
            each.look(away)

    def _end(self, hear: Callable[[int, Message], None]) -> Loss:
        """The first that was lost has a moment's company: what broke the others is its absence."""
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until and any(not each.ended for each in self._ranks):
            self._receive(0.1, hear)
        self.close()
        losses = [each.loss for each in self._ranks if each.loss is not None]
        causes = [each for each in losses if not each.follows]
        first = min(causes or losses, key=lambda each: each.time)
        return Loss(first.rank, first.cause)


@dataclass(frozen=True, slots=True)
class _Sign:
    rank: int
    cause: str
    time: float
    follows: bool = False
    """It broke because another rank did."""


class _Rank:
    def __init__(self, number: int, process: BaseProcess, connection: Connection) -> None:
        self.number = number
        self.process = process
        self.connection = connection
        self.ended = False
        self.loss: _Sign | None = None
        self._heard = LastHeard()

    def receive(self) -> list[Message]:
        try:
            data = self.connection.recv_bytes()
        except (EOFError, OSError):
            self._bury()
            return []
        self._heard.hear()
        told: list[Message] = []
        for message in messages_of(data) if data else ():
            if isinstance(message, Noted) and message.what == BROKE:
                self._lose(message.fields["reason"], follows=message.fields["follows"])
            else:
                told.append(message)
        return told

    def look(self, away_s: float) -> None:
        """`away_s`: for so long nobody has listened."""
        silent = self._heard.silent_s(away_s)
        if not self.ended and silent > HANG_S:
            self._lose(f"it has not been heard of for {silent:.0f} seconds")

    def signal(self, number: int) -> None:
        if self.process.pid is not None and self.process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        if not self.ended:
            self.ended = True
            self.connection.close()

    def _bury(self) -> None:
        self.ended = True
        self.connection.close()
        self.process.join(GRACE_S)
        code = self.process.exitcode
        if code is None or code == 0:
            return
        if code < 0:
            self._lose(f"its process was ended by {signal.Signals(-code).name}")
        else:
            self._lose(f"its process ended with code {code}")

    def _lose(self, cause: str, *, follows: bool = False) -> None:
        if self.loss is None:
            self.loss = _Sign(self.number, cause, time.monotonic(), follows)


class _Line:
    """To the supervisor; a rank whose supervisor is gone ends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # Somebody else may lead the run by now: leave its files alone.
        self._voice = Voice(connection, lambda: os._exit(1))

    def send(self, message: Message) -> None:
        self._voice.write(encoded([message]))

    def commands(self) -> list[Command]:
        """That have come since the last time."""
        found: list[Command] = []
        try:
            while self._connection.poll():
                found += commands_of(self._connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)
        return found


def serve(
    connection: Connection,
    directory: str,
    plan: dict[str, Any],
    jobs: list[str],
    rank: int,
    port: int,
    threads: int | None,
) -> None:
    """The life of a rank's process."""
    line = _Line(connection)
    asked: list[bool] = []
    # Ctrl-C reaches all processes of a terminal; the supervisor decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    import torch

    from tlora.parallel.sharding import follows_another
    from tlora.runtime.group.rank import run_rank

    if threads is not None:
        torch.set_num_threads(threads)
    found = load_plan(plan)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(found.gpus),
        "WORLD_SIZE": str(found.gpus),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        run_rank(
            Path(directory),
            found,
            jobs,
            line.send,
            should_stop=lambda: bool(asked),
            inbox=line.commands,
        )
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        fields = {"reason": reason, "follows": follows_another(error)}
        line.send(Noted(BROKE, time.time(), fields))
        connection.close()
        os._exit(1)
    connection.close()
    # Nothing of torch's own is waited for: the jobs are on disk.
    os._exit(0)


def hold_port() -> socket.socket:
    """A port of this machine for a rank to listen at, seconds from now: while this is open, whoever
    asks for any is given another one."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", 0))
    return found
