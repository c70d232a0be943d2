"""What ranks of a group do in tests: train some of the jobs of support.jobs under a plan."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from support.curves import Curve
from support.jobs import base_model
from support.preference import PAIR_JOBS, PAIRS
from support.rank_faults import break_at, break_twin
from support.rank_jobs import FIRST, STEPS, Seen, Told, new_driver, sharded_model
from tlora.core.errors import SpecError
from tlora.core.plan import Plan
from tlora.model.super_model import SuperModel
from tlora.parallel.counting import Counts
from tlora.training.controller import Controller
from tlora.training.driver import JobDriver, Status
from tlora.training.engine import Engine
from tlora.training.group_engine import GroupEngine, Usage
from tlora.training.group_loop import GroupLoop, run_group
from tlora.training.loop import run_jobs
from tlora.training.outcome import EvaluationDone, StepDone
from tlora.training.size_search import ControllerSettings, Decision, Measure, ladder


def train_in_group(
    plan: Plan,
    *,
    path: str = "",
    exact: bool = False,
    budget: int = 192,
    first: Sequence[str] = FIRST,
    late: dict[int, str] | None = None,
    break_pass: tuple[int, int, str] | None = None,
    fault: str = "",
    twin: str | None = None,
    poison: tuple[int, int, str] | None = None,
    controller: str = "",
) -> Told:
    """Jobs that do not span ranks are dealt in turn. `break_pass`: (rank, nano-batch, place) of an
    exception; `fault` says which (`break_at`). `twin` names something that is done wrong.
    `poison`: (rank, turn, job) whose gradient is made infinite there. `controller` of rank 0 has
    this name (`controller_of`)."""
    rank = dist.get_rank()
    sharded, counts = None, Counts()
    if plan.fsdp > 1:
        model, sharded, counts = sharded_model(path, plan, exact)
        assert not model.jobs
    else:
        model = SuperModel(base_model(), per_sequence=exact)
    before = counts.as_json()
    engine = GroupEngine(
        model,
        budget_tokens=budget,
        bucket_step=None if exact else 32,
        counts=counts,
        sharded=sharded,
        spans=lambda name: spans(plan, name),
        exact=exact,
        controller=controller_of(controller) if controller and rank == 0 else None,
    )
    watcher, course = Seen(engine), Course(engine, plan, late or {}, poison)
    undo, breaks = [], []
    if twin is not None:
        undo.append(break_twin(twin))
    if break_pass is not None and break_pass[0] == rank:
        undo.append(break_at(engine, *break_pass[1:], fault, breaks))
    try:
        run_group(engine, course.arrive(first), watcher, between=course.between)
    finally:
        kept_layers = 0 if sharded is None else sharded.kept_layers
        if kept_layers != plan.kept_layers and sharded is not None:
            # The next test finds it as it was.
            sharded.reset()
            sharded.keep(plan.kept_layers)
        for each in undo:
            each()
        for name in engine.jobs:
            engine.detach(name)
    return Told(
        curves=watcher.curves,
        evaluations=watcher.evaluations,
        failed=watcher.failed,
        errors=watcher.errors,
        counts=less(counts.as_json(), before),
        usage=engine.usage,
        budget=engine.budget_tokens,
        breaks=len(breaks),
        budgets=course.budgets,
        kept_layers=kept_layers,
        actions=[each.action.value for each in watcher.decisions],
    )


class Course:
    """Who trains on this rank, at first and later on."""

    def __init__(
        self,
        engine: GroupEngine,
        plan: Plan,
        late: dict[int, str],
        poison: tuple[int, int, str] | None,
    ) -> None:
        self.budgets: list[tuple[int, int]] = []
        self._engine = engine
        self._plan = plan
        self._coming = dict(late)
        self._poison = poison
        self._turn = 0

    def arrive(self, names: Sequence[str]) -> list[JobDriver]:
        """Those of them that are on this rank."""
        drivers = [new_driver(name) for name in names if self._is_here(name)]
        for driver in drivers:
            driver.attach(self._engine, self._engine.super_model.new_adapter(driver.spec))
        return drivers

    def between(self, loop: GroupLoop) -> bool:
        engine = self._engine
        name = self._coming.pop(self._turn, None)
        self._turn += 1
        if engine.verdict is not None:
            self.budgets.append((engine.verdict.budget, engine.budget_tokens))
        for driver in self.arrive([name] if name is not None else []):
            loop.enter(driver)
        engine.check_integrity()
        if self._poison is not None and self._poison[:2] == (dist.get_rank(), self._turn):
            self._make_infinite(self._poison[2])
        return bool(self._coming)

    def _is_here(self, name: str) -> bool:
        turn = list(STEPS).index(name) % dist.get_world_size()
        return spans(self._plan, name) or turn == dist.get_rank()

    def _make_infinite(self, name: str) -> None:
        if name in self._engine.jobs:
            next(iter(self._engine.super_model.views(name).values())).grad.fill_(float("inf"))


def spans(plan: Plan, name: str) -> bool:
    return plan.adapters == "data_parallel" or name in plan.spread


def less(after: dict[str, dict[str, int]], before: dict[str, dict[str, int]]) -> Any:
    found = {}
    for purpose, tally in after.items():
        old = before.get(purpose, {})
        left = {name: value - old.get(name, 0) for name, value in tally.items()}
        if left["calls"]:
            found[purpose] = left
    return found


def controller_of(name: str) -> Controller:
    """ "stepping" takes another size after every nano-batch, whatever was measured."""
    sizes = ladder(64, 256)
    settings = ControllerSettings(sizes=sizes, start=192, idle=192, limit=256, warm_ups=0)

    class Stepping(Controller):
        def observe(self, measure: Measure) -> tuple[Decision, ...]:
            self.best = sizes[(sizes.index(self.best) + 2) % len(sizes)]
            return ()

    return Stepping(settings) if name == "stepping" else Controller(settings)


def train_alone(names: Sequence[str], *, exact: bool = False, budget: int = 160) -> Told:
    """The same jobs in one process."""
    model = SuperModel(base_model(), per_sequence=exact)
    engine = Engine(model, budget_tokens=budget, bucket_step=None if exact else 32, exact=exact)
    watcher = Seen(engine)
    drivers = []
    for name in names:
        driver = new_driver(name)
        driver.attach(engine, model.new_adapter(driver.spec))
        drivers.append(driver)
    run_jobs(engine, drivers, watcher)
    return Told(watcher.curves, watcher.evaluations, watcher.failed, watcher.errors, {}, Usage())


def train_pairs(path: str = "") -> Told:
    """Preference jobs, with their references: in a group where one spans ranks if there is a base
    on disk, else in one process."""
    specs = [
        replace(spec, train=replace(spec.train, max_steps=6, adam_epsilon=1e-3))
        for spec in PAIR_JOBS
    ]
    counts = Counts()
    rank = 0
    if path:
        rank = dist.get_rank()
        plan = Plan(bucket=192, fsdp=2, adapters="mixed", spread=("pairs",))
        model, sharded, counts = sharded_model(path, plan, False)
        engine: Engine = GroupEngine(
            model,
            budget_tokens=192,
            bucket_step=32,
            counts=counts,
            sharded=sharded,
            spans=lambda name: name == "pairs",
        )
    else:
        model = SuperModel(base_model())
        engine = Engine(model, budget_tokens=160, bucket_step=32)
    watcher = Seen(engine)
    drivers = []
    for spec in specs:
        if spec.name == "pairs" or rank == 0:
            driver = JobDriver(spec, PAIRS[spec.name], PAIRS[spec.name][:3])
            driver.attach(engine, model.new_adapter(spec))
            drivers.append(driver)
    if isinstance(engine, GroupEngine):
        run_group(engine, drivers, watcher)
    else:
        run_jobs(engine, drivers, watcher)
    return Told(watcher.curves, watcher.evaluations, watcher.failed, watcher.errors, {}, Usage())


def pause_on_one_rank(*, step: int) -> tuple[str, str | None, int, dict[str, Curve]]:
    """Rank 0 alone finds that a job that spans ranks cannot be saved after this step, or after the
    last evaluation that follows it."""
    model = SuperModel(base_model())
    engine = GroupEngine(
        model, budget_tokens=192, bucket_step=32, counts=Counts(), spans=lambda name: True
    )

    class Full(Seen):
        def on_step(self, driver: JobDriver, done: StepDone) -> None:
            super().on_step(driver, done)
            if step < driver.total_steps:
                self._pause(driver)

        def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
            super().on_evaluation(driver, done)
            self._pause(driver)

        def _pause(self, driver: JobDriver) -> None:
            if dist.get_rank() == 0 and (driver.name, driver.step) == ("dropped", step):
                driver.status, driver.reason = Status.PAUSED, "the disk is full"

    watcher = Full(engine)
    drivers = [new_driver(name) for name in ("dropped", "one")]
    for driver in drivers:
        driver.attach(engine, model.new_adapter(driver.spec))
    run_group(engine, drivers, watcher)
    paused = drivers[0]
    return paused.status.value, paused.reason, paused.step, watcher.curves


def missing_after_break(path: str) -> int:
    """Gatherings that were made up for, on this rank, when the forward of one broke off."""
    plan = Plan(bucket=192, fsdp=2, adapters="rank_local")
    _, sharded, _ = sharded_model(path, plan, False)
    catch_up, missing = sharded.catch_up, [0]

    def counted(cause: Exception) -> None:
        missing[0] += len(sharded._pass) - sharded._issued
        catch_up(cause)

    sharded.catch_up = counted
    try:
        train_in_group(plan, path=path, first=("one", "odd"), break_pass=(1, 3, "forward"))
    finally:
        sharded.catch_up = catch_up
    return missing[0]


def compared(*, buckets: list[int], attempts: list[int]) -> tuple[str, bool] | str:
    """Of ranks with these plans, which launchers have started so often."""
    from tlora.runtime.group.as_rank import compare

    rank = dist.get_rank()
    try:
        return tuple(compare(Plan(bucket=buckets[rank], replicas=2), attempts[rank]))
    except SpecError as error:
        return str(error)
