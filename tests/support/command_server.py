"""Runs `tlora` and `python` in children forked from one process that has imported the libraries,
which takes many seconds each time otherwise.

    python command_server.py SOCKET

Each connection is one command line. The caller (command_shim.py) hands over its arguments, folder,
environment and standard streams, is told the process id, and then the exit code.
"""

import io
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

STREAMS = 3

HOLD_AFTER = "TLORA_TEST_HOLD_AFTER"
"""Of the environment: a command that has said these words waits for Ctrl-C, which whoever has read
them may send late."""

HOLD_S = 300.0


def serve(path: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        caller, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            wait_for_one(caller)
        caller.close()


def wait_for_one(caller: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, streams, _, _ = socket.recv_fds(caller, 1 << 20, STREAMS)
    child = os.fork()
    if child == 0:
        caller.close()
        run(json.loads(message), streams)
    for stream in streams:
        os.close(stream)
    caller.sendall(f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    caller.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def run(request: dict, streams: Sequence[int]) -> NoReturn:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    # Of this process: they stay open to its end.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    code = 1
    try:
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        if words := os.environ.pop(HOLD_AFTER, ""):
            sys.stdout = Held(words)
        command, *arguments = request["arguments"]
        run_tlora(arguments) if command == "tlora" else run_python(arguments)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Held(io.TextIOWrapper):
    """Standard output that does not return from some words before an interrupt has come."""

    def __init__(self, words: str) -> None:
        super().__init__(open(1, "wb", closefd=False))  # noqa: SIM115
        self._words, self._line = words, ""

    def write(self, text: str, /) -> int:
        written = super().write(text)
        said, end, rest = (self._line + text).rpartition("\n")
        self._line = rest
        if end and self._words and self._words in said:
            self._words = ""
            self._hold()
        return written

    def _hold(self) -> None:
        came: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
        self.flush()
        until = time.monotonic() + HOLD_S
        while not came and time.monotonic() < until:
            time.sleep(0.01)
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def run_tlora(arguments: list[str]) -> None:
    from tlora.cli.main import main

    main(arguments)


def run_python(arguments: list[str]) -> None:
    """As the interpreter would: a file, `-` or nothing for standard input, `-c`, `-m`."""
    first, *rest = arguments or ["-"]
    sys.path.insert(0, os.getcwd())
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first in ("-", "-c"):
        text = sys.stdin.read() if first == "-" else rest[0]
        sys.argv = [first, *(rest if first == "-" else rest[1:])]
        exec(compile(text, "<stdin>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        # Whole: worker processes look for a name without a folder where this server began.
        runpy.run_path(os.path.abspath(first), run_name="__main__")


def load_libraries() -> None:
    """Imports only: no thread of torch may be there when a child is forked."""
    import peft  # noqa: F401

    import tlora.cli.app
    import tlora.runtime.checking
    import tlora.runtime.merging
    import tlora.runtime.previewing
    import tlora.runtime.report
    import tlora.runtime.training
    import tlora.runtime.verifying  # noqa: F401


if __name__ == "__main__":
    load_libraries()
    serve(sys.argv[1])
