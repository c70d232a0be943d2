"""A sweep on one engine in this process: the study decides, this carries it out.

Every event is in the log, with what was decided on it, before anything is done about it. So a sweep
that was killed is replayed from its log and goes on; a trial goes on from its checkpoint, and what
it tells a second time is known.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping

from tlora.core.errors import JobFailed, SpecError, TloraError
from tlora.core.sweep import Params, SweepSpec
from tlora.model.memory import is_out_of_memory
from tlora.runtime.directory import JobResult
from tlora.runtime.recording import Recorder
from tlora.runtime.resuming import Resumption, resumption
from tlora.runtime.sweeps.trials import MadeTrial, TrialMaker, trial_name
from tlora.runtime.sweeps.view import View
from tlora.runtime.training import adapter_start, enter_job
from tlora.store.study import Request, StudyLog
from tlora.training.checkpoint import checkpoints, find_newest
from tlora.training.driver import JobDriver, Status
from tlora.training.loop import run_jobs
from tlora.training.outcome import EvaluationDone, Outcome, StepDone
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
)
from tlora.tuning.samplers import OptunaSampler
from tlora.tuning.study import Phase, StudyState, Trial

LOOK_EVERY_S = 0.5
"""How often requests of people are looked for."""


class SweepRunner:
    def __init__(
        self,
        spec: SweepSpec,
        state: StudyState,
        log: StudyLog,
        maker: TrialMaker,
        made: dict[str, MadeTrial],
        recorder: Recorder,
        view: View,
        on_change: Callable[["SweepRunner"], None],
    ) -> None:
        """`state` has been through all that the log holds; `made` has every trial it knows."""
        self.spec = spec
        self.state = state
        self.log = log
        self.maker = maker
        self.made = made
        self.recorder = recorder
        self.view = view
        self.on_change = on_change
        """Told when trials have come or gone, not more than once between two nano-batches."""

        self.sampler: OptunaSampler | None = None
        self._drivers: dict[str, JobDriver] = {}
        """Of the trials that are attached."""

        self.kept = 0
        """Trials that are in the job file on disk."""

        self._todo: deque[Action] = deque()
        self._changed = False
        self._left_out = 0
        self._leaving: set[str] = set()
        """Given up, their ends not told yet."""

        self._grad_norms: dict[str, float] = {}
        self._started = time.perf_counter()
        self._looked = self._started
        self._seconds_before = log.seconds_before()
        for each in made.values():
            self.recorder.data_keys[each.job.name] = each.data.key

    @property
    def seconds(self) -> float:
        """Of running, in this session and those before."""
        return self._seconds_before + time.perf_counter() - self._started

    def run(self, should_stop: Callable[[], bool]) -> bool:
        """Until the study is over; True if it was stopped before. Trials that were running are
        saved then."""
        while not should_stop():
            self._look_for_requests()
            self._ask()
            while self._todo:
                self._carry_out(self._todo.popleft())
            if self._changed:
                self._changed = False
                self.on_change(self)
            if self._drivers:
                self._train(should_stop)
                continue
            # Ends are told when their files are on disk, and may bring others.
            self.recorder.save([])
            if self._todo:
                continue
            if self.state.over:
                return False
            assert self.state.has_room_for_more, "trials wait, and nothing will happen"
        self.recorder.save(list(self._drivers.values()))
        return True

    def tell(self, event: Event) -> None:
        actions = self.state.on(event)
        self.log.append(event, actions)
        self._todo.extend(actions)
        self.view.on_turn(self.state, event, actions)
        if self.sampler is not None:
            self._tell_sampler(event, actions)

    def add(self, made: dict[str, MadeTrial]) -> None:
        """New trials."""
        self.made |= made
        for each in made.values():
            self.recorder.data_keys[each.job.name] = each.data.key
        # On disk before the log knows of them: a trial of the log is one of the job file.
        self.on_change(self)
        self.tell(Added(tuple(each.plan for each in made.values())))

    # Carrying out

    def take_up(self) -> None:
        """Where a log ends: who was running runs again, and who was to go is gone."""
        # Attaching one may tell an end, which brings others: they are attached by that.
        there = [(trial, trial.phase) for trial in self.state.trials.values()]
        for trial, phase in there:
            has_result = (self.recorder.directory.root / trial.name / "result.json").exists()
            if phase is Phase.RUNNING:
                self._attach(trial.name)
            elif phase is Phase.EXITED and not has_result and trial.started:
                self._leave_again(trial)

    def _leave_again(self, trial: Trial) -> None:
        """It was given up just before the end of a process: its adapters may not be on disk. They
        are if a checkpoint of that step is; if not it runs up to its exit again."""
        saved = checkpoints(self.recorder.directory.root / trial.name / "checkpoints")
        step = int(saved[-1].name.removeprefix("step-")) if saved else 0
        if trial.verdict is None or step >= trial.verdict.step:
            self._write_result(trial)
        else:
            self._attach(trial.name)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Attach(trial=name):
                self._attach(name)
            case Hold(trial=name):
                driver = self._drivers.pop(name, None)
                # It may have failed since; that is told when its files are on disk.
                if driver is not None:
                    self._hold(driver)
            case Exit(verdict=verdict):
                driver = self._drivers.pop(verdict.trial, None)
                if driver is None:
                    self._write_result(self.state.trials[verdict.trial])
                else:
                    self._leave(driver, str(verdict))
                self._changed = True

    def _attach(self, name: str) -> None:
        if name in self._drivers:
            return
        made, trial, directory = self.made[name], self.state.trials[name], self.recorder.directory
        if trial.history.evaluations or trial.kept:
            # What it goes on from may still be on its way to the disk.
            self.recorder.save([])
        found = resumption(directory, made.job)
        if found.result is not None:
            completed = found.result.status == Status.COMPLETED.value
            if trial.live and (completed or not trial.kept):
                # It came to its end, and the process to its own before it could be told.
                self.on_result(found.result)
                return
            # It was given up, and goes on from there all the same.
            newest = find_newest(directory.root / name / "checkpoints")
            found = Resumption(checkpoint=newest.checkpoint, damaged=tuple(newest.damaged))
        driver = JobDriver(made.job, made.data.train, made.data.evaluation)
        try:
            fresh = found.checkpoint is None
            start = adapter_start(made.job, self.recorder.engine.super_model) if fresh else {}
            enter_job(driver, found, start, self.recorder)
        except (TloraError, OSError, ValueError, RuntimeError, MemoryError) as error:
            self._refuse(driver, error)
            return
        self.recorder.start([driver])
        self._drivers[name] = driver

    def _refuse(self, driver: JobDriver, error: Exception) -> None:
        engine = self.recorder.engine
        if driver.name in engine.jobs:
            engine.detach(driver.name)
        if is_out_of_memory(error) and self._drivers:
            self.view.say(f"{driver.name}: no memory beside the others; it waits")
            self.tell(NoRoom(driver.name))
            return
        what = "out of memory: " if is_out_of_memory(error) else ""
        message = error.message if isinstance(error, JobFailed) else f"{what}{error}"
        driver.on_failure(JobFailed(message, job=driver.name))
        self.recorder.on_end(driver)

    def _hold(self, driver: JobDriver) -> None:
        self.recorder.checkpoint(driver)
        self._detach(driver)
        self.recorder.sinks.close(driver.name, "held")
        self.recorder.directory.event("detached", job=driver.name, step=driver.step)

    def _leave(self, driver: JobDriver, reason: str) -> None:
        """Given up, and whole: a person may want it to go on. Its best adapter is on disk."""
        driver.status, driver.reason = Status.STOPPED_EARLY, reason
        self._leaving.add(driver.name)
        self.recorder.checkpoint(driver)
        self.recorder.on_end(driver)
        self._detach(driver)

    def _detach(self, driver: JobDriver) -> None:
        if driver.name in self.recorder.engine.jobs:
            self.recorder.engine.detach(driver.name)

    def _write_result(self, trial: Trial) -> None:
        """Of one that went while it was not attached: all that is known is in its history."""
        directory = self.recorder.directory
        last = trial.history.evaluations[-1] if trial.history.evaluations else None
        best = min(
            trial.history.evaluations,
            key=lambda each: each.metrics.get("eval_loss", math.inf),
            default=None,
        )
        has_best = (directory.job(trial.name) / "best").is_dir()
        result = JobResult(
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
            best_adapter=f"{trial.name}/best" if has_best else None,
        )
        directory.write_result(result)
        directory.event("ended", job=trial.name, status=result.status, reason=result.reason)

    # Training

    def _train(self, should_stop: Callable[[], bool]) -> None:
        drivers = list(self._drivers.values())
        try:
            left = run_jobs(
                self.recorder.engine,
                drivers,
                self,
                should_stop=lambda: bool(self._todo) or should_stop() or self._is_time_to_look(),
            )
        except Exception:
            self.recorder.rescue(drivers)
            raise
        self._drivers = {driver.name: driver for driver in left}
        limit = self.spec.search.max_seconds
        if limit is not None and self.seconds >= limit and not self.state.over_budget:
            self.tell(Spent("seconds", round(self.seconds, 1), limit))

    def _is_time_to_look(self) -> bool:
        now = time.perf_counter()
        limit = self.spec.search.max_seconds
        if limit is not None and self.seconds >= limit and not self.state.over_budget:
            return True
        if now - self._looked < LOOK_EVERY_S:
            return False
        self._looked = now
        return bool(self.log.open_requests())

    def on_nano_batch(self, outcome: Outcome) -> None:
        self.recorder.on_nano_batch(outcome)

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        self._grad_norms[driver.name] = done.grad_norm
        self.recorder.on_step(driver, done)

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        self.recorder.on_evaluation(driver, done)
        trial = self.state.trials[driver.name]
        if trial.live:
            # What it passes by a second time, from a checkpoint, is known.
            if done.step > trial.history.step:
                self._tell_evaluation(driver, done.loss, done.figures)
        elif trial.verdict is not None and done.step >= trial.verdict.step:
            # It was given up here before the process ended.
            self._todo.append(Exit(trial.verdict))

    def _tell_evaluation(
        self, driver: JobDriver, eval_loss: float | None, figures: Mapping[str, float]
    ) -> None:
        values = {
            **{f"eval_{name}": value for name, value in figures.items()},
            "eval_loss": eval_loss,
            "loss": driver.mean_loss if eval_loss is None else driver.recent_loss,
            "grad_norm": self._grad_norms.get(driver.name),
        }
        self.tell(
            Evaluated(
                trial=driver.name,
                step=driver.step,
                tokens=driver.tokens_seen,
                metrics={name: value for name, value in values.items() if value is not None},
            )
        )

    def on_end(self, driver: JobDriver) -> None:
        if driver.evaluation is None and driver.status is Status.COMPLETED:
            # Without held-out rows its training loss is all there is to compare.
            self._tell_evaluation(driver, None, {})
        self.recorder.on_end(driver)

    def on_result(self, result: JobResult) -> None:
        """A trial's end, when its files are on disk."""
        trial = self.state.trials[result.job]
        if result.job in self._leaving:
            # It was given up, which is known; by now it may go on again.
            self._leaving.discard(result.job)
            return
        if not trial.live:
            return
        told = {"trial": result.job, "step": result.steps, "tokens": result.tokens_seen}
        if result.status in (Status.COMPLETED.value, Status.STOPPED_EARLY.value):
            self.tell(Completed(**told, reason=result.reason))
        else:
            self.tell(Failed(**told, reason=result.reason or result.status))
        self._changed = True

    # Samplers that decide as they go

    def _ask(self) -> None:
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
            try:
                made = self.maker.make({name: sampler.ask(name)})
            except TloraError as error:
                # Settings that do not go together: the sampler hears of it, the others go on.
                self.view.say(f"{name}: left out: {error}")
                sampler.tell(name, None)
                self._left_out += 1
                continue
            self.add(made)
            own.append(self.state.trials[name])

    def _todo_has_exit(self) -> bool:
        return any(not isinstance(action, Attach) for action in self._todo)

    def _tell_sampler(self, event: Event, actions: list[Action]) -> None:
        assert self.sampler is not None
        ended = [action.trial for action in actions if isinstance(action, Exit)]
        if isinstance(event, Completed | Failed):
            ended.append(event.trial)
        for name in ended:
            trial = self.state.trials[name]
            failed = trial.phase is Phase.FAILED
            self.sampler.tell(name, None if failed else self.state.value(trial))

    # What people ask for

    def _look_for_requests(self) -> None:
        for request in self.log.open_requests():
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
                if not trial.live:
                    raise SpecError(f"{trial.name} is over: {trial.phase.value}")
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
                return self._clone(trial, request.body)
            case other:
                raise SpecError(f"'{other}' is nothing that can be asked")

    def _clone(self, parent: Trial, changes: Params) -> str:
        taken = [name for name in self.state.trials if name.startswith(f"{parent.name}.")]
        name = f"{parent.name}.{len(taken) + 1}"
        params = {**parent.plan.params, **changes}
        self.add(self.maker.make({name: params}, parent=parent.name))
        return f"cloned as {name}"
