"""Workers with a fault, for tests: `serve` of a worker process in their place."""

from tlora.runtime.executors import processes
from tlora.training.engine import Engine

serve = processes.serve
"""As it is, whatever a test puts in its place."""

TOO_LARGE = "two-03"
"""Has no memory even by itself."""

NEEDS_ALL = "two-01"
"""Has none beside others."""


def without_memory(*arguments) -> None:
    attach = Engine.attach

    def full(self, name, *args, **options):
        if name == TOO_LARGE or (name == NEEDS_ALL and self.jobs):
            raise MemoryError("no room for its rows")
        return attach(self, name, *args, **options)

    Engine.attach = full
    serve(*arguments)
