"""Ctrl-C: once to finish the nano-batch, save and leave; twice to leave now."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupt:
    """Truthy once a person has asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked


@contextmanager
def interruptible(on_first: Callable[[], None]) -> Iterator[Interrupt]:
    """While entered, the first SIGINT or SIGTERM sets the interrupt; the second raises
    KeyboardInterrupt. Signals reach only the main thread: elsewhere nothing is caught."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def handle(number: int, frame: object) -> None:
        if interrupt.asked:
            raise KeyboardInterrupt
        interrupt.asked = True
        on_first()

    previous = {each: signal.signal(each, handle) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
