"""Ctrl-C: once to finish the nano-batch, save and leave; twice to leave now."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class Interrupt:
    """Truthy once a person has asked to stop."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.asked = False
        self._said = False
        self._on_first = on_first

    def __call__(self) -> bool:
        if self.asked:
            self.say()
        return self.asked

    def say(self) -> None:
        if not self._said:
            self._on_first()
            self._said = True


@contextmanager
def interruptible(on_first: Callable[[], None]) -> Iterator[Interrupt]:
    """While entered, the first SIGINT or SIGTERM sets the interrupt; the second raises
    KeyboardInterrupt. Signals reach only the main thread: elsewhere nothing is caught."""
    interrupt = Interrupt(on_first)
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def handle(number: int, frame: object) -> None:
        if interrupt.asked:
            raise KeyboardInterrupt
        interrupt.asked = True
        # The signal may come in the middle of a print, where Python allows no other: then it is
        # said when the interrupt is next looked at.
        with suppress(RuntimeError):
            interrupt.say()

    previous = {each: signal.signal(each, handle) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
