"""The one control loop: events in, policy asked, decisions out, all of it recorded.

    wait for events -> bring the state up to now -> decide -> record -> carry out

The server, `tlora train` and the simulator all run this; they differ in clock, executor and store.
"""

import gc
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from tlora.control.protocols import Executor, Store, Turn
from tlora.core.clock import Clock
from tlora.core.event import Event, Tick
from tlora.core.state import State
from tlora.schedule.fairness import fair_gpus
from tlora.schedule.policy import Policy

TICK_S = 300.0


@contextmanager
def uncollected() -> Generator[None]:
    """Garbage is left for later: a full collection takes longer than most decisions."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Loop:
    def __init__(
        self,
        *,
        state: State,
        policy: Policy,
        executor: Executor,
        store: Store,
        clock: Clock,
        tick_s: float = TICK_S,
    ) -> None:
        """A policy is asked after every event, and at least every `tick_s` while jobs are here."""
        self.state = state
        self.policy = policy
        self.executor = executor
        self.store = store
        self.clock = clock
        self.tick_s = tick_s
        self.turns = 0
        if policy.overtakes:
            state.overtake()
        self._fair = fair_gpus(state)

    def run(self) -> None:
        """Until every job is done and no more can come."""
        while self.state.jobs or not self.executor.idle:
            self.step()

    def step(self) -> None:
        until = float("inf")
        if self.state.jobs:
            until = min(self.state.now + self.tick_s, self.policy.look_by(self.state))
        events = tuple(self.executor.wait(until))
        if not events:
            stuck = self.executor.idle and not self.state.groups
            assert not stuck, "jobs wait, nothing runs, and nothing will happen"
            events = (Tick(self.clock.now()),)
        self.turn(self.clock.now(), events, self.executor.progress())

    def turn(self, now: float, events: Sequence[Event], progress: dict[str, float]) -> Turn:
        """One turn with what the world says; a replay feeds recorded ones."""
        state = self.state
        state.advance(now, progress, self._fair)
        for event in events:
            state.happen(event)
        with uncollected():
            # Timed within: what has been left for later is collected as soon as this ends.
            began = time.process_time()
            decisions = self.policy.decide(state, events)
            decided_s = time.process_time() - began
        done = Turn(self.turns, now, tuple(events), progress, tuple(decisions), decided_s)
        self.turns += 1
        self.store.record(done)
        for decision in decisions:
            state.apply(decision)
            self.executor.apply(decision)
        if decisions or any(not isinstance(event, Tick) for event in events):
            # Dues depend on who is here, not on the time.
            self._fair = fair_gpus(state)
        return done
