"""What is done after a nano-batch broke off: memory is freed, the compiler left out, nano-batches
are made smaller, or its jobs run one by one until the culprit is known.

Whatever it was, the batches of its jobs begin anew; no weight has changed.
"""

import logging
from dataclasses import dataclass

import torch

from tlora.model.memory import is_out_of_memory
from tlora.model.super_model import SuperModel
from tlora.training import optimiser
from tlora.training.batch import Batch
from tlora.training.compose import Composition, Waiting
from tlora.training.engine_job import EngineJob
from tlora.training.outcome import Outcome
from tlora.training.sizing import Sizing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Culprit:
    """A job that broke a nano-batch of its own."""

    job: EngineJob
    reason: str


class Recovery:
    def __init__(self, super_model: SuperModel, sizing: Sizing, *, exact: bool) -> None:
        self.suspects: list[str] = []
        """Jobs that run their whole batch by themselves, one after the other."""

        self._super_model = super_model
        self._sizing = sizing
        self._exact = exact

    def allowed(self, waiting: list[Waiting]) -> list[Waiting]:
        """Those that may run now."""
        if not self.suspects:
            return waiting
        return [each for each in waiting if each.job == self.suspects[0]]

    def went_through(self, batch: Batch) -> None:
        """A part of it; the whole of it clears its job."""
        if batch.job in self.suspects and not batch.left:
            self.suspects.remove(batch.job)

    def forget(self, job: str) -> None:
        self.suspects = [other for other in self.suspects if other != job]

    def after(
        self, error: Exception, composition: Composition, jobs: list[EngineJob], *, group: int
    ) -> Outcome | Culprit:
        """`jobs` are those of the nano-batch, and `group` whom the engine was made up of."""
        if is_out_of_memory(error):
            return self._out_of_memory(error, composition, jobs, group)
        # Other bits than were proven are not what an exact run goes on with.
        if not self._exact and self._super_model.runs_uncompiled(error):
            return self._uncompiled(error, jobs)
        logger.warning("a nano-batch broke off", exc_info=error)
        drop_partial_batches(self._super_model, jobs)
        return self._suspect(jobs, f"{type(error).__name__}: {error}")

    def _out_of_memory(
        self, error: Exception, composition: Composition, jobs: list[EngineJob], group: int
    ) -> Outcome | Culprit:
        drop_partial_batches(self._super_model, jobs)
        if make_room(self._super_model):
            logger.warning("out of memory: captured graphs give theirs back")
            return Outcome(error=f"out of memory: {error}")
        alone = len(jobs) == 1 and len(composition.picks[0].indices) == 1
        if alone or self._exact or self._sizing.is_least:
            return self._suspect(jobs, f"out of memory on {composition.tokens} tokens")
        broken = Outcome(error=f"out of memory: {error}")
        outcome = self._sizing.lowered(composition, broken, group=group)
        logger.warning(
            "out of memory on %d rows: going on with nano-batches of %d tokens",
            composition.rows,
            self._sizing.budget_tokens,
        )
        return outcome

    def _uncompiled(self, error: Exception, jobs: list[EngineJob]) -> Outcome:
        # The compiler's own error stands in its second line.
        reason = " ".join((str(error).strip() or type(error).__name__).splitlines()[:2])
        logger.warning("the layers cannot be compiled, going on without: %s", reason)
        drop_partial_batches(self._super_model, jobs)
        return Outcome(error=f"not compiled: {reason}")

    def _suspect(self, jobs: list[EngineJob], reason: str) -> Outcome | Culprit:
        """There is no single culprit in company, and a device may stumble once: every job of the
        nano-batch runs its whole batch by itself next, and fails only if it fails then."""
        if jobs[0].name in self.suspects:
            return Culprit(jobs[0], reason)
        self.suspects += [job.name for job in jobs]
        return Outcome(error=reason)


def drop_partial_batches(super_model: SuperModel, jobs: list[EngineJob]) -> None:
    """Their batches begin anew."""
    for job in jobs:
        optimiser.clear_gradients(list(super_model.views(job.name).values()))
        job.replay()


def make_room(super_model: SuperModel) -> bool:
    """Give back the memory that is only kept; whether graphs held some of it."""
    held = super_model.release_graphs()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return held
