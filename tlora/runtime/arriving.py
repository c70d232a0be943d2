"""Jobs on their way into an engine that trains others meanwhile.

Whatever does not touch the engine is done by a thread of the job's own: its data are prepared, its
checkpoint is read or its adapter drawn, its weights are looked at and brought to where the model
is, and its rank rows are found. What is left is to attach it, between two nano-batches.
"""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tlora.core.errors import JobFailed, TloraError
from tlora.core.job import JobSpec
from tlora.data.prepare import PreparedData
from tlora.model.adapters import AdapterWeights
from tlora.model.berth import Berth
from tlora.model.super_model import SuperModel
from tlora.runtime.background import in_background
from tlora.runtime.directory import RunDirectory
from tlora.runtime.entering import adapter_start
from tlora.runtime.resuming import Resumption, resumption
from tlora.training.driver import Status
from tlora.training.moving import bring, bring_weights, keep_rows

LEAVE_S = 2.0
"""How long a run that is stopped waits for jobs that were cancelled on their way."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """What a job enters with."""

    found: Resumption
    """In host memory."""

    brought: Resumption
    """The same with the checkpoint's state where the model is."""

    start: AdapterWeights
    """Of a job that begins, where the model is; empty for one that goes on."""

    berth: Berth | None = None
    """Its rows, if there is room for them as it is: kept as long as somebody holds on to this."""


class Verdict(NamedTuple):
    status: Status
    reason: str


class Arrival:
    """One job. Nothing is written on the way but tokens into their cache."""

    def __init__(
        self,
        job: JobSpec,
        directory: RunDirectory,
        model: SuperModel,
        data: PreparedData | Callable[[], PreparedData],
        verdict: Verdict | None = None,
    ) -> None:
        """`data`, or what prepares them. `verdict`: of one that is not to be attached as it is."""
        self.job = job
        self.data: PreparedData | None = None if callable(data) else data
        """Once they are prepared."""

        self.began = time.perf_counter()
        self.verdict = verdict
        """How the job ends, if it is not to be attached."""

        self.is_dropped = False
        """Nobody waits for it any more."""

        self._directory = directory
        self._model = model
        self._prepare = data if callable(data) else None
        self.future: Future[Arrived] = in_background(self._fetch, f"arrival of {job.name}")

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def done(self) -> bool:
        return self.future.done()

    def result(self) -> Arrived:
        """Waits. Raises what keeps the job from entering, which is the job's own matter whatever it
        is."""
        try:
            return self.future.result()
        except (TloraError, OSError, ValueError, RuntimeError, MemoryError):
            raise
        except Exception as error:
            raise JobFailed(f"{type(error).__name__}: {error}", job=self.name) from error

    def set_weight(self, weight: float) -> None:
        """That the job enters with."""
        self.job = replace(self.job, train=replace(self.job.train, weight=weight))

    def dismiss(self, status: Status, reason: str) -> None:
        """It is not to be attached, and ends so when it is here."""
        self.verdict = Verdict(status, reason)

    def _fetch(self) -> Arrived:
        model = self._model
        if model.device.type == "cuda":
            # Every thread has a current device of its own.
            torch.cuda.set_device(model.device)
        found = resumption(self._directory, self.job)
        if found.result is not None:
            return Arrived(found, found, {})
        if self._prepare is not None and not self.is_dropped:
            self.data = self._prepare()
        if not self._is_wanted:
            return Arrived(found, found, {})
        checkpoint = found.checkpoint
        if checkpoint is None:
            start = bring_weights(model, self.name, adapter_start(self.job, model)).result()
            berth = model.keep_rows(self.name, start) if self._is_wanted else None
            return Arrived(found, found, start, berth)
        state = bring(model, self.name, checkpoint.state).result()
        berth = keep_rows(model, self.name, state) if self._is_wanted else None
        brought = replace(found, checkpoint=replace(checkpoint, state=state))
        return Arrived(found, brought, {}, berth)

    @property
    def _is_wanted(self) -> bool:
        """Nobody has said otherwise meanwhile."""
        return self.verdict is None and not self.is_dropped


class Arrivals:
    """Those that are on their way, in the order in which they began."""

    def __init__(self) -> None:
        self._coming: dict[str, Arrival] = {}

    def __len__(self) -> int:
        return len(self._coming)

    def __contains__(self, job: str) -> bool:
        return job in self._coming

    @property
    def names(self) -> list[str]:
        return list(self._coming)

    @property
    def dismissed(self) -> list[str]:
        return [name for name, each in self._coming.items() if each.verdict is not None]

    @property
    def one_is_here(self) -> bool:
        return any(each.done for each in self._coming.values())

    def after_a_nano_batch(self) -> Callable[[], bool]:
        """What a loop asks before every nano-batch: whether one is here. Not before the first: some
        training lies between two that come, so that their pauses do not add up."""
        asked = iter((False,))
        return lambda: next(asked, True) and self.one_is_here

    def add(self, arrival: Arrival) -> None:
        assert arrival.name not in self._coming, f"{arrival.name} is on its way"
        self._coming[arrival.name] = arrival

    def of(self, job: str) -> Arrival:
        return self._coming[job]

    def drop(self, job: str) -> None:
        """Whatever comes of it: as little as can be."""
        self._coming.pop(job).is_dropped = True

    def clear(self) -> None:
        for name in self.names:
            self.drop(name)

    def take(self) -> Arrival | None:
        """The first that is here; it is not on its way any more."""
        for name, each in self._coming.items():
            if each.done:
                return self._coming.pop(name)
        return None

    def take_dismissed(self) -> list[Arrival]:
        """At a stop: those that are to end, and are here within a moment."""
        ending = [self._coming[name] for name in self.dismissed]
        here, _ = wait([each.future for each in ending], timeout=LEAVE_S)
        return [self._coming.pop(each.name) for each in ending if each.future in here]

    def wait(self, timeout_s: float) -> None:
        """Until one is here, and no longer than so."""
        wait(
            [each.future for each in self._coming.values()],
            timeout=timeout_s,
            return_when=FIRST_COMPLETED,
        )
