"""The course of a sweep as a state machine: events in, actions out.

Every trial gets its warm-up, however few fit at once; one that has warmed up gives its room to the
next and waits, its state kept. When all have, the rule selects, and the survivors go on. A trial
that goes makes room for another one at once: of the same batch size first, so that the mix of the
nano-batches stays, then the largest that fits.

There is no clock, no file and no device here, and no randomness.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from tlora.core.errors import SpecError
from tlora.core.sweep import ObjectiveSpec, SweepSpec
from tlora.tuning.events import (
    Action,
    Added,
    Attach,
    Closed,
    Completed,
    Evaluated,
    Event,
    Exit,
    Failed,
    Hold,
    NoRoom,
    Resumed,
    Spent,
    Stopped,
    TrialPlan,
)
from tlora.tuning.exits import Rule, Verdict, rule_of
from tlora.tuning.history import Evaluation, History


class Phase(Enum):
    WAITING = "waiting"
    """It has not run yet."""

    RUNNING = "running"
    HELD = "held"
    """It has warmed up and waits for the others."""

    READY = "ready"
    """It goes on as soon as there is room."""

    COMPLETED = "completed"
    EXITED = "exited"
    FAILED = "failed"


AHEAD = 8
"""Trials that a sampler is asked for before it has heard of any: one that learns has nothing to
learn from until then, and a device with much room would ask for all of them."""

LIVE = (Phase.WAITING, Phase.RUNNING, Phase.HELD, Phase.READY)


@dataclass(slots=True)
class Trial:
    plan: TrialPlan
    history: History
    phase: Phase = Phase.WAITING
    warmed: bool = False
    """It has had its warm-up."""

    started: bool = False
    kept: bool = False
    """A person asked for it: no rule gives it up."""

    step: int = 0
    tokens: int = 0
    reason: str | None = None
    verdict: Verdict | None = None

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def live(self) -> bool:
        return self.phase in LIVE


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the sweep may use."""

    room_bytes: float | None = None
    """For the adapters that are attached at a time; None: it is not known, and not asked."""

    parallel: int | None = None
    """So many at once at most."""

    tokens: int | None = None
    """Trained by all trials together."""


@dataclass(slots=True)
class StudyState:
    rule: Rule
    objective: ObjectiveSpec
    limits: Limits = field(default_factory=Limits)
    trials: dict[str, Trial] = field(default_factory=dict[str, Trial])
    closed: bool = False
    selected: bool = False
    """The rule has chosen among those that warmed up."""

    over_budget: bool = False
    _budget: tuple[str, float, float] = ("tokens", 0.0, 0.0)
    """What of it was spent, how much, and how much there was."""

    _learnt_bytes: float | None = None
    """What was attached when there was no memory for one more."""

    @classmethod
    def of(cls, spec: SweepSpec, room_bytes: float | None) -> "StudyState":
        search = spec.search
        limits = Limits(
            room_bytes=room_bytes, parallel=search.max_parallel, tokens=search.max_tokens
        )
        return cls(rule_of(spec.early_exit, search.objective), search.objective, limits)

    @property
    def over(self) -> bool:
        return self.closed and not any(trial.live for trial in self.trials.values())

    @property
    def tokens_spent(self) -> int:
        return sum(trial.tokens for trial in self.trials.values())

    @property
    def has_room_for_more(self) -> bool:
        """A sampler may be asked for another trial: all that wait have been attached, and it has
        heard of enough of those it was asked for before."""
        waiting = any(trial.phase is Phase.WAITING for trial in self.trials.values())
        unheard = sum(self._is_unheard_of(trial) for trial in self.trials.values())
        return not (self.closed or waiting) and unheard < AHEAD and self._below_parallel()

    def _is_unheard_of(self, trial: Trial) -> bool:
        """It has no value yet that can be told: that of its warm-up, or of its end."""
        warm = trial.warmed and self.rule.warmup is not None
        return trial.live and not warm and trial.plan.parent is None

    def warmup_steps(self, plan: TrialPlan) -> float:
        """That a trial makes before it is compared with the others; 0 where none is held."""
        if self.rule.warmup is None:
            return 0.0
        least = min(self.rule.min_warmup_steps, plan.total_steps)
        # As the part was typed: 0.07 of 100 is 7, not a little more.
        return max(round(self.rule.warmup * plan.total_steps, 9), least)

    def value(self, trial: Trial) -> float | None:
        return trial.history.value(self.objective)

    def ranked(self) -> list[Trial]:
        """Best first; failed ones, and those of which nothing is known, last."""

        def key(trial: Trial) -> tuple[bool, float]:
            value = self.value(trial)
            lost = trial.phase is Phase.FAILED or value is None
            return lost, 0.0 if value is None else self.objective.key(value)

        return sorted(self.trials.values(), key=key)

    @property
    def best(self) -> Trial | None:
        """The best so far."""
        for trial in self.ranked():
            if trial.phase is not Phase.FAILED and self.value(trial) is not None:
                return trial
        return None

    def on(self, event: Event) -> list[Action]:
        """What is to be done now: who goes and who is held, then who comes."""
        actions: list[Action] = []
        freed: int | None = None
        match event:
            case Added(plans=plans):
                for plan in plans:
                    self._add(plan)
            case Closed():
                self.closed = True
            case Evaluated():
                actions = self._evaluated(event)
                freed = self._batch_of(event.trial)
            case Completed(trial=name, step=step, tokens=tokens, reason=reason):
                self._end(name, Phase.COMPLETED, step, tokens, reason)
                freed = self._batch_of(name)
            case Failed(trial=name, step=step, tokens=tokens, reason=reason):
                self._end(name, Phase.FAILED, step, tokens, reason)
                freed = self._batch_of(name)
            case NoRoom(trial=name):
                self._no_room(self.trials[name])
            case Stopped(trial=name):
                actions = self._stop(self.trials[name])
                freed = self._batch_of(name)
            case Resumed(trial=name):
                self._resume(self.trials[name])
            case Spent(what=what, spent=spent, limit=limit):
                actions = self._spent(what, spent, limit)
        actions += self._select_if_all_are_warm(actions)
        limit = self.limits.tokens
        if limit is not None and self.tokens_spent >= limit and not self.over_budget:
            actions += self._spent("tokens", self.tokens_spent, limit)
        return actions + self._fill(freed)

    def _add(self, plan: TrialPlan) -> None:
        if plan.name in self.trials:
            raise SpecError("there is a trial of this name", job=plan.name, field="name")
        trial = Trial(plan, History(plan.total_steps))
        room = self.limits.room_bytes
        if room is not None and self.is_too_large(plan):
            trial.phase = Phase.FAILED
            trial.reason = (
                f"its adapter takes {plan.adapter_bytes / 2**30:.2f} GiB with its optimiser, and "
                f"there are {room / 2**30:.2f}"
            )
        # A sweep that has nothing left to spend takes no more, unless a person asks.
        elif self.over_budget and plan.parent is None:
            self._exit(trial, self._over_budget_verdict(trial))
        self.trials[plan.name] = trial

    def _evaluated(self, event: Evaluated) -> list[Action]:
        trial = self.trials[event.trial]
        if event.step <= trial.history.step or not trial.live:
            # Told before: a trial that goes on from a checkpoint comes by here again.
            return []
        trial.history = trial.history.then(
            Evaluation(step=event.step, tokens=event.tokens, metrics=event.metrics)
        )
        trial.step, trial.tokens = event.step, event.tokens
        warmup, last = self.rule.warmup, event.step >= trial.plan.total_steps
        reached = event.step >= self.warmup_steps(trial.plan)
        newly_warm = reached and not trial.warmed
        trial.warmed = trial.warmed or reached
        if last:
            return []
        if not trial.kept:
            histories = {
                each.name: each.history for each in self.trials.values() if each.history.evaluations
            }
            verdict = self.rule.judge(trial.name, histories)
            if verdict is not None:
                return [self._exit(trial, verdict)]
        holds = warmup is not None and not self.selected and trial.plan.parent is None
        if newly_warm and holds:
            trial.phase = Phase.HELD
            return [Hold(trial.name)]
        return []

    def _select_if_all_are_warm(self, before: list[Action]) -> list[Action]:
        """`before` may hold the trial that was the last to warm up: it need not leave to go on."""
        if self.selected or self.rule.warmup is None or not self.closed:
            return []
        cohort = [trial for trial in self.trials.values() if trial.plan.parent is None]
        if any(trial.live and not trial.warmed for trial in cohort):
            return []
        self.selected = True
        held = {each.name: each.history for each in cohort if each.phase is Phase.HELD}
        verdicts = {each.trial: each for each in self.rule.select(held, len(cohort))}
        last = before[-1] if before else None
        actions: list[Action] = []
        for name in held:
            trial, still_here = self.trials[name], last == Hold(name)
            if name in verdicts and not trial.kept:
                actions.append(self._exit(trial, verdicts[name]))
            else:
                trial.phase = Phase.RUNNING if still_here else Phase.READY
            if still_here:
                before.pop()
        return actions

    def _exit(self, trial: Trial, verdict: Verdict) -> Exit:
        trial.phase, trial.verdict, trial.reason = Phase.EXITED, verdict, str(verdict)
        return Exit(verdict)

    def _end(self, name: str, phase: Phase, step: int, tokens: int, reason: str | None) -> None:
        trial = self.trials[name]
        if trial.live:
            trial.phase, trial.reason = phase, reason
            trial.step, trial.tokens = step, tokens

    def is_too_large(self, plan: TrialPlan) -> bool:
        """Even by itself."""
        room = self.limits.room_bytes
        return room is not None and plan.adapter_bytes > room

    def _no_room(self, trial: Trial) -> None:
        if not trial.live:
            return
        trial.phase = Phase.READY if trial.warmed else Phase.WAITING
        self._learnt_bytes = self.attached_bytes

    def _stop(self, trial: Trial) -> list[Action]:
        if not trial.live:
            return []
        verdict = Verdict(trial=trial.name, rule="person", step=trial.step, why="stopped by hand")
        return [self._exit(trial, verdict)]

    def _resume(self, trial: Trial) -> None:
        trial.kept = True
        if trial.phase in (Phase.EXITED, Phase.FAILED, Phase.HELD):
            trial.phase = Phase.READY
            trial.verdict = trial.reason = None

    def _spent(self, what: str, spent: float, limit: float) -> list[Action]:
        self.over_budget = True
        self._budget = what, spent, limit
        return [
            self._exit(trial, self._over_budget_verdict(trial))
            for trial in self.trials.values()
            if trial.live and not trial.kept
        ]

    def _over_budget_verdict(self, trial: Trial) -> Verdict:
        what, spent, limit = self._budget
        return Verdict(
            trial=trial.name,
            rule="budget",
            step=trial.step,
            numbers={"spent": spent, "limit": limit},
            why=f"the sweep has used {spent:,.0f} {what} of the {limit:,.0f} it was given",
        )

    @property
    def attached_bytes(self) -> float:
        return sum(each.plan.adapter_bytes for each in self._in(Phase.RUNNING))

    def _fill(self, freed: int | None) -> list[Action]:
        """Attach who waits, while there is room."""
        actions: list[Action] = []
        for trial in self._next_in_line(freed):
            if self._fits(trial):
                trial.phase, trial.started = Phase.RUNNING, True
                actions.append(Attach(trial.name))
        return actions

    def _next_in_line(self, freed: int | None) -> list[Trial]:
        """Those that have proved themselves, then those of the batch size that went, then the
        largest batches: they are the hardest to place."""
        waiting = [*self._in(Phase.READY), *self._in(Phase.WAITING)]
        return sorted(
            waiting,
            key=lambda each: (
                each.phase is not Phase.READY,
                each.plan.batch_size != freed,
                -each.plan.batch_size,
            ),
        )

    def _fits(self, trial: Trial) -> bool:
        if not self._below_parallel():
            return False
        room, attached = self.limits.room_bytes, self.attached_bytes
        if self._learnt_bytes is not None and attached:
            # What was found out by trying counts only beside others: alone it may be tried again.
            room = self._learnt_bytes if room is None else min(room, self._learnt_bytes)
        return room is None or attached + trial.plan.adapter_bytes <= room

    def _below_parallel(self) -> bool:
        most = self.limits.parallel
        return most is None or len(list(self._in(Phase.RUNNING))) < most

    def _in(self, phase: Phase) -> Iterable[Trial]:
        return (trial for trial in self.trials.values() if trial.phase is phase)

    def _batch_of(self, name: str) -> int:
        return self.trials[name].plan.batch_size

    def check_integrity(self) -> None:
        """Books that must agree; for tests and idle moments."""
        room, most = self.limits.room_bytes, self.limits.parallel
        running = list(self._in(Phase.RUNNING))
        assert room is None or self.attached_bytes <= room, "more is attached than there is room"
        assert most is None or len(running) <= most, f"{len(running)} trials run at once"
        for trial in self.trials.values():
            steps = [each.step for each in trial.history.evaluations]
            assert steps == sorted(set(steps)), f"{trial.name} was told of a step twice"
            assert trial.phase is not Phase.EXITED or trial.reason, f"{trial.name} left for nothing"
            assert not (trial.phase is Phase.HELD and self.selected), f"{trial.name} was forgotten"


def replayed(state: StudyState, events: Iterable[Event]) -> list[list[Action]]:
    """The same events again: what was decided on each."""
    return [state.on(event) for event in events]
