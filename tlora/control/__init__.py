"""The one loop that turns events into decisions, and what it needs of the world; no torch."""

from tlora.control.loop import Loop
from tlora.control.protocols import Executor, Store, Turn

__all__ = ["Executor", "Loop", "Store", "Turn"]
