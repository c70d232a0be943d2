"""The course of one task, wherever its trials train: its study, the log, its sampler, and what
people ask of it.

Every event is in the log, with what was decided on it, before anything is done about it: `todo` has
what is to be done.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from tlora.core.errors import SpecError, TloraError
from tlora.core.sweep import Params, SweepSpec
from tlora.runtime.directory import JobResult, RunDirectory
from tlora.runtime.sweeps.trials import MadeTrial, TrialMaker, trial_name
from tlora.runtime.sweeps.view import View
from tlora.store.requests import Request
from tlora.store.study import StudyLog
from tlora.training.driver import Status
from tlora.tuning.events import (
    Action,
    Added,
    Attach,
    Closed,
    Completed,
    Event,
    Exit,
    Failed,
    Hold,
    Resumed,
    Stopped,
)
from tlora.tuning.samplers import OptunaSampler
from tlora.tuning.study import Phase, StudyState, Trial


class Course:
    def __init__(
        self,
        spec: SweepSpec,
        state: StudyState,
        log: StudyLog,
        maker: TrialMaker,
        made: dict[str, MadeTrial],
        view: View,
        on_change: Callable[[Self], None],
        *,
        task: str | None = None,
    ) -> None:
        """`state` has been through all that the log holds; `made` has every trial it knows; `task`
        is its name in the log, where that has several."""
        self.spec = spec
        self.state = state
        self.log = log
        self.maker = maker
        self.made = made
        self.view = view
        self.task = task
        self.on_change = on_change
        """Told when trials have come or gone, not more than once between two nano-batches."""

        self.sampler: OptunaSampler | None = None
        self.proven_ranks: frozenset[int] | None = None
        """With exact isolation: the ranks that it was shown for."""

        self.kept = 0
        """Trials that are in the job file on disk."""

        self.todo: deque[Action] = deque()
        self.changed = False
        self._left_out = 0
        self._started = time.perf_counter()
        self._seconds_before = log.seconds_before()

    @property
    def seconds(self) -> float:
        """Of running, in this session and those before."""
        return self._seconds_before + time.perf_counter() - self._started

    def begin_clock(self) -> None:
        """What came before was no running."""
        self._started = time.perf_counter()

    def tell(self, event: Event) -> None:
        actions = self.state.on(event)
        self.log.append(event, actions, self.task)
        self.todo.extend(actions)
        self.view.on_turn(self.state, event, actions)
        if self.sampler is not None:
            self._tell_sampler(event, actions)

    def add(self, made: dict[str, MadeTrial]) -> None:
        """New trials."""
        self.made |= made
        # On disk before the log knows of them: a trial of the log is one of the job file.
        self.on_change(self)
        self.tell(Added(tuple(each.plan for each in made.values())))

    def tell_end(self, result: JobResult) -> None:
        """Of a trial that lives, when its files are on disk."""
        told = {"trial": result.job, "step": result.steps, "tokens": result.tokens_seen}
        if result.status in (Status.COMPLETED.value, Status.STOPPED_EARLY.value):
            self.tell(Completed(**told, reason=result.reason))
        else:
            self.tell(Failed(**told, reason=result.reason or result.status))
        self.changed = True

    def is_end_of(self, trial: Trial, result: JobResult) -> bool:
        """A result on disk is all that is left to tell of the trial. If not it goes on from its
        checkpoint: it was given up and is to run all the same, or came to its end without the log
        having heard what it came to."""
        if result.status == Status.COMPLETED.value:
            return trial.live and trial.history.step >= result.steps
        return trial.live and not trial.kept

    def result_of(self, trial: Trial, folder: Path) -> JobResult:
        """Of one that went while it was not attached: all that is known is in its history."""
        last = trial.history.evaluations[-1] if trial.history.evaluations else None
        best = min(
            trial.history.evaluations,
            key=lambda each: each.metrics.get("eval_loss", math.inf),
            default=None,
        )
        return JobResult(
            job=trial.name,
            status=Status.STOPPED_EARLY.value,
            reason=trial.reason,
            steps=trial.step,
            total_steps=trial.plan.total_steps,
            loss=last.metrics.get("loss") if last else None,
            first_eval_loss=None,
            eval_loss=last.metrics.get("eval_loss") if last else None,
            best_eval_loss=best.metrics.get("eval_loss") if best else None,
            best_step=best.step if best else None,
            tokens_seen=trial.tokens,
            sequences_seen=0,
            seconds=round(self.seconds, 3),
            adapter=None,
            best_adapter=f"{trial.name}/best" if (folder / "best").is_dir() else None,
        )

    def write_result(self, trial: Trial, directory: RunDirectory) -> None:
        result = self.result_of(trial, directory.job(trial.name))
        directory.write_result(result)
        directory.event("ended", job=trial.name, status=result.status, reason=result.reason)

    # Samplers that decide as they go

    def ask(self) -> None:
        sampler, search = self.sampler, self.spec.search
        if sampler is None or search.trials is None:
            return
        own = [trial for trial in self.state.trials.values() if trial.plan.parent is None]
        # Those that were left out have numbers, too, but a log does not know them.
        last = max((int(each.name.rpartition("-")[2]) for each in own), default=-1)
        self._left_out = max(self._left_out, last + 1 - len(own))
        while self.state.has_room_for_more and not self._todo_has_exit():
            number = len(own) + self._left_out
            if number >= search.trials or self.state.over_budget:
                self.tell(Closed())
                return
            name = trial_name(self.spec, number, max(2, len(str(search.trials - 1))))
            params = sampler.ask(name)
            try:
                made = self._made(name, params)
            except TloraError as error:
                # Settings that do not go together: the sampler hears of it, the others go on.
                self.view.say(f"{name}: left out: {error}")
                sampler.tell(name, None)
                self._left_out += 1
                continue
            self.add(made)
            own.append(self.state.trials[name])

    def _made(self, name: str, params: Params, parent: str | None = None) -> dict[str, MadeTrial]:
        """Raises TloraError for settings that do not go together, or were not foreseen."""
        made = self.maker.make({name: params}, parent=parent)
        rank = made[name].job.lora.r
        if self.proven_ranks is not None and rank not in self.proven_ranks:
            shown = ", ".join(map(str, sorted(self.proven_ranks)))
            raise SpecError(
                f"is {rank}; exact isolation was shown for {shown} when the sweep began, and can "
                "be shown only while no trial runs: take one of these, or a sweep of its own",
                job=name,
                field="lora.r",
            )
        return made

    def _todo_has_exit(self) -> bool:
        return any(not isinstance(action, Attach) for action in self.todo)

    def _tell_sampler(self, event: Event, actions: list[Action]) -> None:
        assert self.sampler is not None
        # What has warmed up is told at once: those that are asked for next can learn from it.
        known = [action.trial for action in actions if isinstance(action, Exit | Hold)]
        if isinstance(event, Completed | Failed):
            known.append(event.trial)
        for name in known:
            trial = self.state.trials[name]
            failed = trial.phase is Phase.FAILED
            self.sampler.tell(name, None if failed else self.state.value(trial))

    # What people ask for

    def answer(self, request: Request) -> None:
        try:
            said = self._answer(request)
        except TloraError as error:
            said = f"error: {error}"
        self.log.answer(request.number, said)
        self.view.say(f"asked to {request.kind} {request.trial}: {said}")

    def _answer(self, request: Request) -> str:
        trial = self.state.trials.get(request.trial)
        if trial is None:
            raise SpecError(f"there is no trial '{request.trial}'")
        match request.kind:
            case "stop":
                by_hand = trial.verdict is not None and trial.verdict.rule == "person"
                if not trial.live and not by_hand:
                    raise SpecError(f"{trial.name} is over: {trial.phase.value}")
                if trial.live:
                    self.tell(Stopped(trial.name))
                return "stopped; its best adapter is kept"
            case "resume":
                if trial.phase is Phase.COMPLETED:
                    raise SpecError(f"{trial.name} ran to its end")
                if self.state.is_too_large(trial.plan):
                    raise SpecError(f"{trial.name} has no room: {trial.reason}")
                self.tell(Resumed(trial.name))
                return "goes on, whatever the rules say"
            case "clone":
                return self._clone(trial, request)
            case other:
                raise SpecError(f"'{other}' is nothing that can be asked")

    def _clone(self, parent: Trial, request: Request) -> str:
        for trial in self.state.trials.values():
            if trial.plan.request == request.number:
                # The process ended between the log and the answer.
                return f"cloned as {trial.name}"
        for field in request.body:
            self.spec.check_comparable(field, at=field)
        taken = [name for name in self.state.trials if name.startswith(f"{parent.name}.")]
        name = f"{parent.name}.{len(taken) + 1}"
        params = {**parent.plan.params, **request.body}
        (made,) = self._made(name, params, parent=parent.name).values()
        plan = replace(made.plan, request=request.number)
        self.add({name: replace(made, plan=plan)})
        return f"cloned as {name}"
