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
from tlora.core.decision import Refuse
from tlora.core.event import Event, JobFailure, Tick
from tlora.core.state import State
from tlora.core.wording import number_of
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
        self._refused = False
        """The last turn sent a job away."""

        self._asked_in_vain = False
        """The last turn decided nothing, though nothing runs and nothing will happen."""

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
            if self._refused:
                # Others are due more, and may be looked at for the first time.
                until = self.state.now
        events = tuple(self.executor.wait(until))
        now = self.clock.now()
        stuck = not events and self.executor.idle and not self.state.groups
        if not events:
            # A policy that has not been asked since is asked first.
            events = self._given_up(now) if stuck and self._asked_in_vain else (Tick(now),)
        turn = self.turn(now, events, self.executor.progress())
        self._asked_in_vain = stuck and not turn.decisions

    def _given_up(self, now: float) -> tuple[Event, ...]:
        """Jobs wait, nothing runs, and nothing will happen: GPUs that they need do not come back.
        They fail by name, so that whoever is behind them may go on."""
        state = self.state
        assert state.is_damaged, "jobs wait, nothing runs, and nothing will happen"
        why = f"{state.up_gpus} of {number_of(len(state.cluster), 'GPU')} are up"
        if state.speed:
            why += f", {len(state.speed)} of them slow,"
        why += " and nothing will change: it has no place on these within its bound"
        return tuple(JobFailure(now, job.name, why) for job in state.waiting())

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
        self._refused = any(isinstance(decision, Refuse) for decision in decisions)
        self.store.record(done)
        for decision in decisions:
            state.apply(decision)
            self.executor.apply(decision)
        if decisions or any(not isinstance(event, Tick) for event in events):
            # Dues depend on who is here, not on the time.
            self._fair = fair_gpus(state)
        return done
