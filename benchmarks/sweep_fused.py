"""A sweep as `tlora tune` runs it, in memory: the trials of sweep_trials.py fused on one model."""

from collections import deque

from sweep_trials import Clock, Seconds, Sweep

from tlora.core.sweep import EarlyExitSpec, Method, ObjectiveSpec
from tlora.model.super_model import SuperModel
from tlora.training.driver import JobDriver, Status
from tlora.training.engine import Engine
from tlora.training.engine_job import JobState
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
)
from tlora.tuning.exits import rule_of
from tlora.tuning.study import Phase, StudyState


class FusedSweep:
    """The loop of tlora/runtime/sweeps/running.py without files and people."""

    def __init__(self, sweep: Sweep, model: SuperModel, budget: int, method: Method) -> None:
        objective = ObjectiveSpec()
        self.sweep = sweep
        self.state = StudyState(rule_of(EarlyExitSpec(method=method), objective), objective)
        # Few sizes: a device compiles for each.
        step = None if model.device.type == "cpu" else budget // 4
        self.engine = Engine(model, budget_tokens=budget, bucket_step=step)
        self.starts = {job.name: model.new_adapter(job) for job in sweep.jobs}
        self.drivers = {
            job.name: JobDriver(job, sweep.train, sweep.evaluation) for job in sweep.jobs
        }
        self.waiting: dict[str, JobState] = {}
        self.running: dict[str, JobDriver] = {}
        self.todo: deque[Action] = deque()
        self.told: list[Event] = []
        self.nano_batches = 0

    def run(self) -> Seconds:
        clock = Clock(self.engine.super_model.device)
        try:
            self.tell(Added(tuple(map(self.sweep.plan, self.sweep.jobs))))
            self.tell(Closed())
            while self.todo or self.running:
                while self.todo:
                    self.carry_out(self.todo.popleft())
                left = run_jobs(
                    self.engine, self.running.values(), self, should_stop=lambda: bool(self.todo)
                )
                self.running = {driver.name: driver for driver in left}
            return clock.read()
        finally:
            for name in self.engine.jobs:
                self.engine.detach(name)

    def tell(self, event: Event) -> None:
        self.told.append(event)
        self.todo.extend(self.state.on(event))

    def carry_out(self, action: Action) -> None:
        name = action.trial
        if isinstance(action, Attach):
            driver, state = self.drivers[name], self.waiting.pop(name, None)
            driver.attach(self.engine, state.weights if state else self.starts[name], state=state)
            self.running[name] = driver
            return
        driver = self.running.pop(name, None)
        if driver is None or name not in self.engine.jobs:
            return
        if isinstance(action, Hold):
            self.waiting[name] = self.engine.state(name)
        else:
            assert isinstance(action, Exit)
        self.engine.detach(name)

    def on_nano_batch(self, outcome: Outcome) -> None:
        assert outcome.error is None, outcome.error
        self.nano_batches += 1

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        pass

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        if done.step == 0:
            return
        self.tell(
            Evaluated(
                trial=driver.name,
                step=driver.step,
                tokens=driver.tokens_seen,
                metrics={"eval_loss": done.loss, "loss": driver.recent_loss},
            )
        )

    def on_end(self, driver: JobDriver) -> None:
        told = {"trial": driver.name, "step": driver.step, "tokens": driver.tokens_seen}
        if driver.status is Status.COMPLETED:
            self.tell(Completed(**told))
        else:
            self.tell(Failed(**told, reason=driver.reason or ""))

    @property
    def best_losses(self) -> dict[str, float]:
        """Of the trials that did not fail."""
        return {
            trial.name: value
            for trial in self.state.trials.values()
            if trial.phase is not Phase.FAILED and (value := self.state.value(trial)) is not None
        }
