"""The process that workers and ranks are forked from."""

import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext


def fork_server(preload: Sequence[str]) -> ForkServerContext:
    """One that has these modules loaded, or is about to. Ctrl-C reaches every process of a
    terminal; this one, and what is forked from it, hears it at no time. Loading takes seconds, and
    whoever leads could start nothing, nor end as it was asked to, if it were gone."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    # Before: starting one lets signals through.
    resource_tracker.ensure_running()
    # A process begins with the mask of who starts it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context
