"""Workers with a fault, for tests: `serve` of a worker process in their place."""

import select
import time
from pathlib import Path

from tlora.runtime.arriving import Arrivals
from tlora.runtime.executors import processes
from tlora.runtime.executors.messages import GiveUp, Stepped
from tlora.runtime.executors.worker import Worker
from tlora.runtime.recording import Recorder
from tlora.training.engine import Engine

serve = processes.serve
"""As it is, whatever a test puts in its place."""

TOO_LARGE = "two-03"
"""Has no memory even by itself."""

NEEDS_ALL = "two-01"
"""Has none beside others."""


def without_memory(*arguments) -> None:
    """Who needs all of it comes after those that are on their way with it, however fast their
    threads are."""
    attach, take = Engine.attach, Arrivals.take

    def others_first(self):
        held = self._coming.pop(NEEDS_ALL) if NEEDS_ALL in self and len(self) > 1 else None
        try:
            return take(self)
        finally:
            if held is not None:
                self._coming[NEEDS_ALL] = held

    def full(self, name, *args, **options):
        if name == TOO_LARGE or (name == NEEDS_ALL and self.jobs):
            raise MemoryError("no room for its rows")
        return attach(self, name, *args, **options)

    Engine.attach, Arrivals.take = full, others_first
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


HELD_STEP = 20
"""From here on jobs of workers that wait are in no hurry."""

WAIT_S = 1.0
"""For a word, at every step: a leader may be so many times this late as there are steps left."""


def waits_for_words(connection, *arguments, once: bool = False) -> None:
    """Its jobs do not run away from a leader that is slow: each of their steps from some on waits
    for what the leader says next. With `once` that is over when it has said anything after its
    first word."""
    put, obey, words = processes._Outbox.put, Worker.obey, []

    def held(self, message):
        put(self, message)
        if isinstance(message, Stepped) and message.step >= HELD_STEP:
            if once and len(words) > 1:
                return
            self.flush()
            connection.poll(WAIT_S)

    def obeying(self, command):
        words.append(command)
        obey(self, command)

    processes._Outbox.put, Worker.obey = held, obeying
    serve(connection, *arguments)


def waits_for_a_word(*arguments) -> None:
    waits_for_words(*arguments, once=True)


LEAVES = "wide"
"""Is to be cancelled while it trains."""


def waits_to_be_left(connection, directory, *arguments) -> None:
    """One of its jobs, which is to be cancelled, takes its time until then: a leader may be many
    seconds late."""
    put, obey = processes._Outbox.put, Worker.obey
    left = Path(directory) / "left"

    def held(self, message):
        put(self, message)
        if (
            isinstance(message, Stepped)
            and message.job == LEAVES
            and message.step >= HELD_STEP
            and not left.exists()
        ):
            self.flush()
            connection.poll(0.25)

    def obeying(self, command):
        if isinstance(command, GiveUp):
            left.touch()
        obey(self, command)

    processes._Outbox.put, Worker.obey = held, obeying
    serve(connection, directory, *arguments)
