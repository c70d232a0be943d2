"""Work that somebody waits for later, in a thread of its own. No torch."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """What came of it, once it is through. A process that ends does not wait for it."""
    future: Future[T] = Future()

    def carry_out() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            # Whatever it is: whoever waits for this one would wait for ever.
            future.set_exception(error)

    try:
        threading.Thread(target=carry_out, name=name, daemon=True).start()
    except RuntimeError as error:
        # There are too many threads: whoever waits hears of it.
        future.set_exception(error)
    return future
