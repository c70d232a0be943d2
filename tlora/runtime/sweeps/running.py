"""A sweep on one engine in this process: the study decides, this carries it out.

Every event is in the log, with what was decided on it, before anything is done about it. So a sweep
that was killed is replayed from its log and goes on; a trial goes on from its checkpoint, and what
it tells a second time is known.
"""

import time
from collections.abc import Callable

from tlora.core.errors import JobFailed, TloraError
from tlora.core.sweep import SweepSpec
from tlora.model.adapters import AdapterWeights
from tlora.model.memory import is_out_of_memory
from tlora.runtime.arriving import Arrival, Arrivals
from tlora.runtime.directory import JobResult
from tlora.runtime.entering import adapter_start, enter_job
from tlora.runtime.recording import Recorder
from tlora.runtime.resuming import Resumption, is_saved_with
from tlora.runtime.sweeps.course import Course
from tlora.runtime.sweeps.metrics import trial_metrics
from tlora.runtime.sweeps.trials import MadeTrial, TrialMaker
from tlora.runtime.sweeps.view import View
from tlora.store.study import StudyLog
from tlora.training.checkpoint import find_newest
from tlora.training.driver import JobDriver, Status
from tlora.training.engine import Engine
from tlora.training.loop import run_jobs
from tlora.training.outcome import EvaluationDone, Outcome, StepDone
from tlora.tuning.events import Action, Attach, Evaluated, Exit, Hold, NoRoom, Spent
from tlora.tuning.study import Phase, StudyState, Trial

LOOK_EVERY_S = 0.5
"""How often requests of people are looked for."""

WAIT_S = 0.1
"""For trials on their way, where nobody trains: a wish to stop goes unseen no longer."""


def comes_meanwhile(engine: Engine) -> bool:
    """Whether others train while a trial comes. Not on a CPU, where there is nothing to copy, and
    not where bits count: who trains with whom, and so the order in which trials are heard, is then
    the same in every sweep."""
    return engine.super_model.device.type == "cuda" and not engine.exact


class SweepRunner(Course):
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
        super().__init__(spec, state, log, maker, made, view, on_change)
        self.recorder = recorder
        self._drivers: dict[str, JobDriver] = {}
        """Of the trials that are attached."""

        self._arrivals = Arrivals()
        self._leaving: set[str] = set()
        """Given up, their ends not told yet."""

        self._looked = time.perf_counter()
        self._know_data(made)

    def _know_data(self, made: dict[str, MadeTrial]) -> None:
        for each in made.values():
            self.recorder.data_keys[each.job.name] = each.data.key

    def run(self, should_stop: Callable[[], bool]) -> bool:
        """Until the study is over; True if it was stopped before. Trials that were running are
        saved then."""
        while not should_stop():
            for request in self.log.open_requests():
                self.answer(request)
            self.ask()
            while self.todo:
                self._carry_out(self.todo.popleft())
                if not self.todo:
                    # Who has gone may have made room for one that nobody has asked for yet.
                    self.ask()
            if self.changed:
                self.changed = False
                self.on_change(self)
            arrival = self._arrivals.take()
            if arrival is not None:
                self._enter(arrival, since=time.perf_counter())
                if self.todo:
                    continue
            if self._drivers:
                self._train(should_stop)
                continue
            if self._arrivals:
                self._arrivals.wait(WAIT_S)
                self.recorder.settle()
                continue
            # Ends are told when their files are on disk, and may bring others.
            self.recorder.save([])
            if self.todo:
                continue
            if self.state.over:
                return False
            assert self.state.has_room_for_more, "trials wait, and nothing will happen"
        self.recorder.save(list(self._drivers.values()))
        return True

    def add(self, made: dict[str, MadeTrial]) -> None:
        self._know_data(made)
        super().add(made)

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
        are if its last evaluation is in a checkpoint; if not it runs up to its exit again."""
        verdict, directory = trial.verdict, self.recorder.directory
        if verdict is None or is_saved_with(directory, trial.name, verdict.step):
            self.write_result(trial, directory)
        else:
            self._attach(trial.name)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Attach(trial=name):
                self._attach(name)
            case Hold(trial=name):
                self._turn_away(name)
                driver = self._drivers.pop(name, None)
                # It may have failed since; that is told when its files are on disk.
                if driver is not None:
                    self._hold(driver)
            case Exit(verdict=verdict):
                self._turn_away(verdict.trial)
                driver = self._drivers.pop(verdict.trial, None)
                if driver is None:
                    # Its best adapter, which the result names, may still be on its way to the disk.
                    self.recorder.save([])
                    self.write_result(self.state.trials[verdict.trial], self.recorder.directory)
                else:
                    self._leave(driver, str(verdict))
                self.changed = True

    def _attach(self, name: str) -> None:
        if name in self._drivers or name in self._arrivals:
            return
        made, trial, recorder = self.made[name], self.state.trials[name], self.recorder
        if trial.history.evaluations or trial.kept:
            # What it goes on from may still be on its way to the disk.
            recorder.save([])
        model = recorder.engine.super_model
        arrival = Arrival(made.job, recorder.directory, model, made.data)
        if comes_meanwhile(recorder.engine):
            self._arrivals.add(arrival)
        else:
            self._enter(arrival, since=arrival.began)

    def _turn_away(self, name: str) -> None:
        """If it is on its way: what it had is on disk."""
        if name in self._arrivals:
            self._arrivals.drop(name)

    def _enter(self, arrival: Arrival, *, since: float) -> None:
        made, trial = self.made[arrival.name], self.state.trials[arrival.name]
        driver = JobDriver(made.job, made.data.train, made.data.evaluation)
        try:
            arrived = arrival.result()
            found, start, over = arrived.brought, arrived.start, arrived.found.result
            if over is not None and not self.is_end_of(trial, over):
                over = None
                found, start = self._from_checkpoint(made)
            if over is None:
                enter_job(driver, found, start, self.recorder)
        except (TloraError, OSError, ValueError, RuntimeError, MemoryError) as error:
            self._refuse(driver, error)
            return
        if over is not None:
            # The process came to its own end before it could be told.
            self.on_result(over)
            return
        self.recorder.start([driver], since=since)
        self._drivers[driver.name] = driver
        if driver.step and driver.is_just_evaluated:
            # It was saved after an evaluation that the process may not have lived to log.
            self._evaluated(driver)

    def _from_checkpoint(self, made: MadeTrial) -> tuple[Resumption, AdapterWeights]:
        """One that has come to an end and goes on all the same."""
        newest = find_newest(self.recorder.directory.root / made.job.name / "checkpoints")
        found = Resumption(checkpoint=newest.checkpoint, damaged=tuple(newest.damaged))
        fresh = found.checkpoint is None
        return found, adapter_start(made.job, self.recorder.engine.super_model) if fresh else {}

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

    # Training

    def _train(self, should_stop: Callable[[], bool]) -> None:
        drivers = list(self._drivers.values())
        one_comes = self._arrivals.after_a_nano_batch()
        try:
            left = run_jobs(
                self.recorder.engine,
                drivers,
                self,
                should_stop=lambda: (
                    bool(self.todo) or should_stop() or self._is_time_to_look() or one_comes()
                ),
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
        self.recorder.on_step(driver, done)

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        self.recorder.on_evaluation(driver, done)
        self._evaluated(driver)

    def _evaluated(self, driver: JobDriver) -> None:
        trial = self.state.trials[driver.name]
        if trial.live:
            # What it passes by a second time, from a checkpoint, is known.
            if driver.step > trial.history.step:
                self._tell_evaluation(driver)
        elif trial.verdict is not None and driver.step >= trial.verdict.step:
            # It was given up here before the process ended.
            self.todo.append(Exit(trial.verdict))

    def _tell_evaluation(self, driver: JobDriver) -> None:
        self.tell(
            Evaluated(
                trial=driver.name,
                step=driver.step,
                tokens=driver.tokens_seen,
                metrics=trial_metrics(driver),
            )
        )

    def on_end(self, driver: JobDriver) -> None:
        if driver.evaluation is None and driver.status is Status.COMPLETED:
            # Without held-out rows its training loss is all there is to compare.
            self._tell_evaluation(driver)
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
        self.tell_end(result)
