"""What a rank writes of its jobs, and what it says of those that span ranks."""

from collections.abc import Callable
from pathlib import Path

from tlora.core.plan import Plan
from tlora.runtime.executors.worker import Tell, ToldDirectory
from tlora.runtime.group.plans import spans
from tlora.runtime.recording import Recorder
from tlora.training.driver import JobDriver
from tlora.training.outcome import EvaluationDone, Outcome, StepDone


class GroupDirectory(ToldDirectory):
    """Says of a job that spans ranks on how many it is."""

    def __init__(self, root: Path, tell: Tell, plan: Plan) -> None:
        super().__init__(root, tell)
        self._plan = plan

    def event(self, kind: str, **fields: object) -> None:
        if kind == "attached" and spans(self._plan, str(fields["job"])):
            fields["ranks"] = self._plan.ranks
        super().event(kind, **fields)


class OwnJobs:
    """The recorder, told only of the jobs that this rank writes."""

    def __init__(self, recorder: Recorder, records: Callable[[str], bool]) -> None:
        self._recorder = recorder
        self._records = records

    def on_nano_batch(self, outcome: Outcome) -> None:
        self._recorder.on_nano_batch(outcome)

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        if self._records(driver.name):
            self._recorder.on_step(driver, done)

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        if self._records(driver.name):
            self._recorder.on_evaluation(driver, done)

    def on_end(self, driver: JobDriver) -> None:
        if self._records(driver.name):
            self._recorder.on_end(driver)
