"""Ctrl-C at any moment: the first asks, the second leaves."""

import io
import os
import signal

import pytest

from tlora.runtime.interrupts import interruptible


class SignallingFile(io.RawIOBase):
    """Ctrl-C is pressed while it is being written to."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.pressed = False

    def writable(self) -> bool:
        return True

    def write(self, data, /) -> int:
        if not self.pressed:
            self.pressed = True
            os.kill(os.getpid(), signal.SIGINT)
        self.written += bytes(data)
        return len(data)


def test_an_interrupt_in_the_middle_of_a_print_is_said_after_it() -> None:
    """Python allows no print inside another one's flush: it raises, and the run would end in a
    traceback without saving."""
    raw = SignallingFile()
    out = io.TextIOWrapper(io.BufferedWriter(raw), write_through=True)
    with interruptible(lambda: print("stopping", file=out, flush=True)) as interrupt:
        print("step 1", file=out, flush=True)
        assert raw.pressed
        assert interrupt() and interrupt()
    assert raw.written == b"step 1\nstopping\n"


def test_the_first_is_said_once_and_the_second_raises() -> None:
    """Outside, SIGINT is as it was before."""
    said: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with interruptible(lambda: said.append("stopping")) as interrupt:
        assert not interrupt()
        signal.raise_signal(signal.SIGINT)
        assert interrupt() and said == ["stopping"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert said == ["stopping"] and signal.getsignal(signal.SIGINT) is before
