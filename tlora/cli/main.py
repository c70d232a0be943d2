"""The `tlora` command from its first moment on: Ctrl-C ends it quietly, also while everything else
is still being imported. So little is imported here."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

INTERRUPTED = 130


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs one command line and exits with its code; unexpected errors keep their traceback."""
    try:
        load_app()(args)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except RuntimeError as error:
        # Python 3.11 makes one of what is raised while a class is told the names of its attributes,
        # as those of enums are, by the hundred, in what a verb imports.
        if isinstance(error.__cause__, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        raise


def load_app() -> Callable[[Sequence[str] | None], NoReturn]:
    """With all verbs. Meanwhile an interrupt ends the process where it is: an exception would be at
    the mercy of what is imported, and there is nothing yet to be cleared up."""
    before = signal.getsignal(signal.SIGINT)
    # Those who ignore it, or handle it in their own way, go on with that; threads may not ask.
    at_once = before is signal.default_int_handler
    at_once = at_once and threading.current_thread() is threading.main_thread()
    if at_once:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    try:
        from tlora.cli.app import run
    finally:
        if at_once:
            signal.signal(signal.SIGINT, before)
    return run
