"""The arms of a benchmark by name, in the order in which a round runs them: what matters most comes
first, for time may run out. Each is made, and warmed up, when its turn comes.
"""

import gc
import time
from collections import Counter as Tally
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers.modeling_utils import PreTrainedModel

from tlora.model.super_model import SuperModel
from tlora.runtime.benchmark import frozen, processes, shapes
from tlora.runtime.benchmark.arms import (
    Adapters,
    Counter,
    draw_adapters,
    train_one_at_a_time,
    train_together,
)
from tlora.runtime.benchmark.peft_arm import (
    PeftJobs,
    batches_of,
    is_available,
    train_one_by_one,
)
from tlora.runtime.benchmark.processes import Processes
from tlora.runtime.benchmark.rounds import Arm, LeftOut, Prepare, Run
from tlora.runtime.benchmark.settings import Settings
from tlora.runtime.benchmark.steadiness import BEFORE_CAPTURE, MOST_RUNS, Graphs, settle
from tlora.runtime.benchmark.workload import Workload

FUSED = "fused"
OWN = "frozen, own"
# In the layout that is faster without: compiling takes long.
COMPILED = {"padded": "frozen, compiled, padded", "packed": "frozen, compiled, packed"}
ONE_AT_A_TIME = "one at a time"
PLAIN = {"padded": "frozen, padded", "packed": "frozen, packed"}
PEFT = {"padded": "PEFT, padded", "packed": "PEFT, packed"}
FUSED_SPREAD = "fused, in processes"
PEFT_SPREAD = {"padded": "PEFT in processes, padded", "packed": "PEFT in processes, packed"}

NAMES: dict[str, Sequence[str]] = {
    "fused": (FUSED,),
    "own": (OWN,),
    "compiled": tuple(COMPILED.values()),
    "one-at-a-time": (ONE_AT_A_TIME,),
    "plain": tuple(PLAIN.values()),
    "peft": tuple(PEFT.values()),
    "processes": (FUSED_SPREAD, *PEFT_SPREAD.values()),
}
"""As they are asked for. Both layouts of a kind are its arms."""


@dataclass(kw_only=True, slots=True)
class Lineup:
    """What arms are made of; one copy of the weights for all."""

    settings: Settings
    model: PreTrainedModel
    ours: SuperModel
    work: Workload
    adapters: Adapters
    graphs: Graphs
    until: float
    """On time.monotonic: compiling is given up then, too."""

    nano_batches: int = 0
    """Of one fused run, once there was one."""

    _plain: dict[str, frozen.PlainFrozen] = field(default_factory=dict[str, frozen.PlainFrozen])
    _faster: str | None = None
    _peft: PeftJobs | None = None
    _processes: Processes | None = None

    @property
    def budget(self) -> int:
        assert self.settings.budget
        return self.settings.budget

    @property
    def peft_under_autocast(self) -> bool:
        return self._peft is not None and self._peft.autocast

    def arms(self, kinds: Sequence[str]) -> dict[str, Prepare]:
        """Of these kinds. The fused arm is warm by then: what memory it takes is looked at."""
        made: dict[str, Prepare] = {
            FUSED: lambda: self.fused,
            OWN: self.own,
            **{name: self._later(self.compiled, how) for how, name in COMPILED.items()},
            ONE_AT_A_TIME: self.one_at_a_time,
            **{name: self._later(self.plain, how) for how, name in PLAIN.items()},
            **{name: self._later(self.peft, how) for how, name in PEFT.items()},
            FUSED_SPREAD: self._later(self.spread, processes.FUSED),
            **{name: self._later(self.spread, how) for how, name in PEFT_SPREAD.items()},
        }
        return {name: made[name] for kind in kinds for name in NAMES[kind]}

    def warm_fused(self) -> None:
        """Until every size of nano-batch has been seen often enough to be captured."""
        seen: Tally[int] = Tally()

        def run() -> None:
            counter = Counter()
            train_together(
                self.ours, self.work, self.work.jobs, self.budget, counter, adapters=self.adapters
            )
            self.nano_batches = counter.nano_batches
            seen.update(counter.sizes)

        least = BEFORE_CAPTURE if self.ours.routing.compiled else 0
        with self.graphs.watched():
            self.graphs.warm_up_runs = settle(
                run,
                self.graphs.state,
                enough=lambda: all(count >= least for count in seen.values()),
                most=max(MOST_RUNS, least + 1),
            )

    def fused(self) -> Run:
        with self.graphs.watched(len(self.work.jobs)):
            return train_together(
                self.ours, self.work, self.work.jobs, self.budget, adapters=self.adapters
            )

    def own(self) -> Arm:
        arm = frozen.OwnFrozen(self.ours, self.work, self.budget)
        with self.graphs.watched():
            settle(arm, self.graphs.state)
        return arm

    def one_at_a_time(self) -> Arm:
        def run() -> Run:
            return train_one_at_a_time(self.ours, self.work, self.budget, adapters=self.adapters)

        def watched() -> Run:
            with self.graphs.watched(len(self.work.jobs)):
                return run()

        with self.graphs.watched():
            settle(run, self.graphs.state)
        return watched

    def plain(self, how: str) -> Arm:
        if how not in self._plain:
            model = shapes.twin(self.model)
            arm = frozen.PlainFrozen(model, self.work, self.budget, packed=how == "packed")
            arm()
            self._plain[how] = arm
        return self._plain[how]

    def compiled(self, how: str) -> Arm:
        """In the faster layout; the other one is left out without a word."""
        if how != self.faster_layout():
            raise LeftOut
        if time.monotonic() > self.until:
            raise LeftOut("left out, time was over")
        twin = shapes.twin(self.model)
        arm = frozen.PlainFrozen(twin, self.work, self.budget, packed=how == "packed")
        left = self.until - time.monotonic()
        reason = frozen.why_not_compiled(
            twin,
            arm,
            int(max(1, min(self.settings.compile_seconds, left))),
            dynamic=arm.shapes_vary,
        )
        if reason is not None:
            raise LeftOut(reason)
        return arm

    def faster_layout(self) -> str:
        """Of the plain backbone. Where all lengths are the same nothing is padded, and rows apart
        need no mask; so it is taken to be, too, where the plain backbone is not measured."""
        if self._faster is None:
            same = len({len(row) for row in self.work.sequences}) == 1
            known = same or "plain" not in self.settings.kinds
            self._faster = (
                "padded" if known else min(PLAIN, key=lambda how: self.plain(how)().seconds)
            )
        return self._faster

    def peft(self, how: str) -> Arm:
        if self._peft is None:
            self._peft = PeftJobs(shapes.twin(self.model), self.adapters)
            job = self.work.jobs[0]
            batch = batches_of(job, self.work.rows[job.name])[-1]
            self._peft.choose_products(job, batch, packed=how == "packed")
        jobs = self._peft
        train_one_by_one(jobs, self.work, packed=how == "packed")
        return lambda: train_one_by_one(jobs, self.work, packed=how == "packed")

    def alone(self, kind: str) -> dict[str, Prepare]:
        """The arms of a kind once ours is not needed any more: they have the device to
        themselves."""
        self.ours.release_graphs()
        self._plain.clear()
        gc.collect()
        if self.ours.device.type == "cuda":
            torch.cuda.empty_cache()
        return self.arms([kind])

    def spread(self, what: str) -> Arm:
        """Over processes, which wait between their runs."""
        threads = self.settings.threads
        if self.ours.device.type != "cpu" or not threads or threads < 2:
            raise LeftOut
        if what != processes.FUSED and ("peft" not in self.settings.kinds or not is_available()):
            raise LeftOut
        if self._processes is None:
            self._processes = Processes(self.settings, threads)
        started = self._processes
        started.run(what)
        return lambda: started.run(what)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()

    def _later(self, prepare: Callable[[str], Arm], how: str) -> Prepare:
        return lambda: prepare(how)


def new_lineup(
    settings: Settings, model: PreTrainedModel, work: Workload, *, until: float
) -> Lineup:
    """Of a super-model over a twin of the model, which shares its weights."""
    # Rows for all jobs and one more, so that no pool grows under the clock.
    reserve = work.total_rank + max(job.lora.r for job in work.jobs)
    own = shapes.twin(model, quantization=settings.quantization)
    ours = SuperModel(own, reserve_rows=reserve, compiled=not settings.skip_compile)
    return Lineup(
        settings=settings,
        model=model,
        ours=ours,
        work=work,
        adapters=draw_adapters(ours, work.jobs),
        graphs=Graphs(ours),
        until=until,
    )
