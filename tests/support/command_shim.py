"""Stands on the PATH as `tlora` and as `python`: has the command run by command_server.py.

Started with -I -S for each command, so it imports little.
"""

import json
import os
import signal
import socket
import sys


def call(path: str, arguments: list[str]) -> int:
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    request = {
        "arguments": arguments,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
    }
    # The command may speak, and be answered with Ctrl-C, before its number is known here.
    numbers = (signal.SIGINT, signal.SIGTERM)
    early: list[int] = []
    for number in numbers:
        signal.signal(number, lambda number, _: early.append(number))
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    answers = server.makefile()
    child = int(answers.readline())
    for number in numbers:
        signal.signal(number, lambda number, _: os.kill(child, number))
    for number in early:
        os.kill(child, number)
    code = int(answers.readline())
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    command = os.path.basename(sys.argv[0])
    sys.exit(call(os.environ["TLORA_COMMAND_SERVER"], [command, *sys.argv[1:]]))
