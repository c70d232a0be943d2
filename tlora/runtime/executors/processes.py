"""Workers as processes of this machine, one for each device.

They are forked from one server process that has loaded torch and transformers (multiprocessing's
forkserver): loading these takes seconds, a fork does not, and a device that was lost is soon back.
Commands and messages go through pipes as JSON. A worker whose leader is gone ends by itself,
whatever it is about; one that the leader does not hear of for some seconds is ended, and is lost.

Each imports the script that started it, as multiprocessing does. One that starts workers wherever
it is imported would do so again in each of them: `end_if_imported` ends those, and the leader says
what is missing.
"""

import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from tlora.core.errors import SpecError
from tlora.runtime.executors.messages import (
    URGENT,
    Command,
    Lost,
    Message,
    Stop,
    commands_of,
    encoded,
    messages_of,
)
from tlora.runtime.executors.worker import Worker, WorkerSettings
from tlora.runtime.fork_server import fork_server
from tlora.runtime.listening import LastHeard, Listener, Voice

FLUSH_S = 0.1
"""Steps and the like are sent together, no later than this."""

HANG_S = 30.0
"""Without a beat for so long a worker is taken for lost. No other one waits for it, and a job that
loses its device twice fails: there is no hurry."""

CLOSE_S = 60.0
"""For checkpoints at the end; then a worker is ended without."""

IMPORTED_CODE = 117
"""Of a worker that came upon the call that started it. Not one of Python's or the shell's."""


def end_if_imported() -> None:
    """To be called first by what starts workers."""
    # Set by multiprocessing while a worker imports the script; its own check looks here, too.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(IMPORTED_CODE)


def no_guard() -> SpecError:
    script = getattr(sys.modules["__main__"], "__file__", None) or "the script"
    return SpecError(
        f"{script}: every worker process imports this script, and came upon the call that starts "
        "workers; put what it does into a function main(), and call that in these two lines at its "
        'end:\n\nif __name__ == "__main__":\n    main()\n'
    )


class WorkerProcesses:
    """Devices 0, 1, ...: a process each."""

    def __init__(
        self,
        settings: Sequence[WorkerSettings],
        *,
        threads: int | None = 1,
        lock: int | None = None,
    ) -> None:
        """With so many threads for torch in each; None leaves that to torch. `lock`: the handle by
        which the run's directory is taken, so that it is until the last of them is gone."""
        self._settings = list(settings)
        self._threads = threads
        self._lock = None if lock is None else _Lock(lock)
        self._context = fork_server([__name__])
        self._listener = Listener()
        self._workers = [self._started(each) for each in self._settings]

    def __len__(self) -> int:
        return len(self._workers)

    def send(self, device: int, command: Command) -> None:
        """To one that is gone: its loss is told by `receive`."""
        with suppress(OSError):
            self._workers[device].connection.send_bytes(encoded([command]))

    def receive(self, timeout_s: float) -> list[tuple[int, Message]]:
        """Whatever comes first, waiting no longer than so; maybe nothing. Raises SpecError if
        workers end because of the script that started them."""
        alive = {
            each.connection: device for device, each in enumerate(self._workers) if not each.lost
        }
        messages: list[tuple[int, Message]] = []
        for connection in wait(list(alive), timeout_s):
            assert isinstance(connection, Connection)
            device = alive[connection]
            data: bytes | None = None
            with suppress(EOFError, OSError):
                data = connection.recv_bytes()
            if data is None:
                messages.append((device, Lost(self._workers[device].bury())))
            else:
                self._workers[device].heard = LastHeard()
                messages += [(device, message) for message in _messages_in(data)]
        return messages + self._silent()

    def _silent(self) -> list[tuple[int, Message]]:
        """Those that have stopped beating; one that has not begun may be importing a script."""
        away = self._listener.away_s()
        messages: list[tuple[int, Message]] = []
        for device, worker in enumerate(self._workers):
            if worker.lost or worker.heard is None:
                continue
            silent = worker.heard.silent_s(away)
            if silent > HANG_S:
                worker.process.kill()
                worker.bury()
                reason = f"it has not been heard of for {silent:.0f} seconds"
                messages.append((device, Lost(reason)))
        return messages

    def restart(self, device: int) -> None:
        assert self._workers[device].lost, f"device {device} is there"
        self._workers[device] = self._started(self._settings[device])

    def close(self) -> list[tuple[int, Message]]:
        for device, worker in enumerate(self._workers):
            if not worker.lost:
                self.send(device, Stop())
        end = time.monotonic() + CLOSE_S
        return [
            (device, message)
            for device, worker in enumerate(self._workers)
            for message in worker.last_words(max(0.1, end - time.monotonic()))
        ]

    def pid(self, device: int) -> int:
        found = self._workers[device].process.pid
        assert found is not None
        return found

    def _started(self, settings: WorkerSettings) -> "_Handle":
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve,
            args=(
                *(theirs, str(settings.directory), *astuple(settings)[1:]),
                *(self._threads, self._lock),
            ),
            name=f"tlora {settings.device}",
            # Ends with this process, should it come to that.
            daemon=True,
        )
        process.start()
        theirs.close()
        return _Handle(process, ours)


class _Handle:
    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.lost = False
        self.heard: LastHeard | None = None

    def bury(self) -> str:
        """Its pipe is closed: how it ended."""
        self.lost = True
        self.connection.close()
        self.process.join(CLOSE_S)
        code = self.process.exitcode
        if code == IMPORTED_CODE:
            raise no_guard()
        if code is not None and code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with code {code}"

    def last_words(self, timeout_s: float) -> list[Message]:
        """Until it has ended, by itself or because time was up or it has gone silent."""
        said: list[Message] = []
        if not self.lost:
            end = time.monotonic() + timeout_s
            with suppress(EOFError, OSError):
                while self.connection.poll(min(HANG_S, max(0.0, end - time.monotonic()))):
                    said += _messages_in(self.connection.recv_bytes())
        self.process.join(1.0)
        if self.process.is_alive():
            # One that is stopped would not hear of anything less.
            self.process.kill()
            self.process.join()
        return said


def _messages_in(data: bytes) -> list[Message]:
    """None in a beat."""
    return messages_of(data) if data else []


def serve(
    connection: Connection,
    directory: str,
    device: str,
    limit_tokens: int | None,
    exact_tokens: int | None,
    asks: bool,
    reserve_rows: int | None,
    threads: int | None,
    lock: "_Lock | None" = None,
) -> None:
    """The life of a worker process, which has the lock as long as it lives."""
    import torch

    # Ctrl-C reaches all processes of a terminal; the leader decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if threads is not None:
        torch.set_num_threads(threads)
    settings = WorkerSettings(
        Path(directory), device, limit_tokens, exact_tokens, asks, reserve_rows
    )
    outbox = _Outbox(connection)
    threading.Thread(target=end_with_leader, args=(connection,), daemon=True).start()
    try:
        worker = Worker(settings, outbox.put)
        while not worker.stopped:
            while not worker.stopped and connection.poll(0 if worker.has_work else None):
                for command in commands_of(connection.recv_bytes()):
                    worker.obey(command)
            if worker.has_work:
                worker.work(connection.poll)
            outbox.flush()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        end_without_leader()


def end_with_leader(connection: Connection) -> None:
    """In a thread of its own: a worker may be loading, or in a long nano-batch."""
    hung_up = select.poll()
    # Nothing but that it is closed at the other end.
    hung_up.register(connection.fileno(), 0)
    hung_up.poll()
    end_without_leader()


def end_without_leader() -> NoReturn:
    """At once, nothing saved: it did not hear all that it was told, and somebody else may lead the
    run by now."""
    os._exit(1)


class _Lock:
    """A handle of which a process that is started gets a copy."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied_lock, (reduction.DupFd(self.handle),)


def _copied_lock(copy: Any) -> _Lock:
    handle = copy.detach()
    # Not for what the worker itself may start.
    os.set_inheritable(handle, False)
    return _Lock(handle)


class _Outbox:
    """To the leader."""

    def __init__(self, connection: Connection) -> None:
        # Not raised: an error in the middle of training has jobs saved.
        self._voice = Voice(connection, end_without_leader)
        self._waiting: list[Message] = []
        self._flushed = time.monotonic()

    def put(self, message: Message) -> None:
        self._waiting.append(message)
        if isinstance(message, URGENT) or time.monotonic() - self._flushed > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            self._voice.write(encoded(self._waiting))
            self._waiting.clear()
        self._flushed = time.monotonic()
