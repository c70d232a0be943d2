"""An engine of a group that takes the time of what it waits for: the control element, and sums over
ranks."""

from tlora.parallel.counting import Purpose
from tlora.parallel.lock_step import Verdict
from tlora.training.compose import Kind
from tlora.training.engine_job import EngineJob
from tlora.training.group_engine import GroupEngine


class TimedEngine(GroupEngine):
    def _agree(self) -> Verdict:
        with self.counts.timed(Purpose.CONTROL):
            return super()._agree()

    def _combine(self, job: EngineJob) -> None:
        is_step = job.batch is not None and job.batch.kind is Kind.TRAIN
        with self.counts.timed(Purpose.GRADIENT if is_step else Purpose.FIGURES):
            super()._combine(job)
