"""Workers with a fault, for tests: `serve` of a worker process in their place."""

import select
import time
from pathlib import Path

from tlora.runtime.executors import processes
from tlora.runtime.recording import Recorder
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


EVALUATED = "evaluated"
"""A file of the run directory: a trial is through with an evaluation, and has not told it yet."""


def slow_to_tell(connection, directory, *arguments) -> None:
    """Its trials tell their first evaluation when the leader is gone."""
    hung_up = select.poll()
    hung_up.register(connection.fileno(), 0)
    on_evaluation = Recorder.on_evaluation

    def late(self, driver, done):
        on_evaluation(self, driver, done)
        if done.step:
            (Path(directory) / EVALUATED).touch()
            while not hung_up.poll(0):
                time.sleep(0.01)

    Recorder.on_evaluation = late
    serve(connection, directory, *arguments)


def long_in_training(connection, directory, *arguments) -> None:
    """Its trials train on and on, whoever is gone."""

    def endless(self, driver, done):
        (Path(directory) / EVALUATED).touch()
        time.sleep(600)

    Recorder.on_evaluation = endless
    serve(connection, directory, *arguments)
