"""What ranks of a group do in tests: train some of the jobs of support.jobs under a plan."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from support.curves import Curve, Watcher
from support.jobs import BY_NAME, ROWS, VOCABULARY, base_model
from support.preference import PAIR_JOBS, PAIRS
from tlora.core.errors import SpecError
from tlora.core.job import BaseSpec, EvalSpec, JobSpec
from tlora.core.plan import Plan
from tlora.core.sequence import TokenSequence
from tlora.model import compiling, super_model
from tlora.model.loading import load_base
from tlora.model.packing import Share, pack
from tlora.model.super_model import SuperModel
from tlora.parallel import lock_step
from tlora.parallel.counting import Counts
from tlora.parallel.lock_step import Pass, Standing
from tlora.parallel.mesh import shard_mesh
from tlora.parallel.reduction import sum_in_order
from tlora.parallel.shard_loading import load_sharded
from tlora.parallel.sharding import Sharded
from tlora.training.controller import Controller, ControllerSettings, Decision, Measure, ladder
from tlora.training.driver import JobDriver, Status
from tlora.training.engine import Engine
from tlora.training.group_engine import GroupEngine, Usage
from tlora.training.group_loop import GroupLoop, run_group
from tlora.training.loop import run_jobs
from tlora.training.outcome import EvaluationDone, Outcome, StepDone

STEPS = {"one": 14, "odd": 6, "dropped": 8, "wide": 5, "upper-layer": 12, "widest": 7}
"""They end at different times."""

LATE = {3: "widest", 6: "upper-layer"}
"""These come before the agreement of that number."""

FIRST = ("one", "odd", "dropped", "wide")
HELD_OUT = ROWS["one"][:5]


def spec_of(name: str) -> JobSpec:
    spec = BY_NAME[name]
    # After so few steps Adam would make whole steps of gradients that are next to nothing, and with
    # them of their rounding (support/tiny.py).
    train = replace(spec.train, max_steps=STEPS[name], adam_epsilon=1e-3)
    return replace(spec, train=train, eval=EvalSpec(split=5, steps=4))


class Seen(Watcher):
    """Evaluations too, and what broke off."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.evaluations: dict[str, list[float]] = {}
        self.errors: list[str] = []
        self.decisions: list[Decision] = []

    def on_nano_batch(self, outcome: Outcome) -> None:
        self.decisions += outcome.decisions
        if outcome.error is not None:
            self.errors.append(outcome.error)

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        self.evaluations.setdefault(driver.name, []).append(done.loss)


@dataclass
class Told:
    """By one rank."""

    curves: dict[str, Curve]
    evaluations: dict[str, list[float]]
    failed: dict[str, str]
    errors: list[str]
    counts: dict[str, dict[str, int]]
    """Of training alone."""

    usage: Usage
    budget: int = 0
    """Tokens of a nano-batch, in the end."""

    breaks: int = 0
    """Passes that were broken on purpose."""

    kept_layers: int = 0
    """In the end."""

    budgets: list[tuple[int, int]] = field(default_factory=list)
    """Agreed on, and in use here, after each turn."""

    actions: list[str] = field(default_factory=list)
    """Of the controller."""


@cache
def sharded_model(path: str, plan: Plan, exact: bool) -> tuple[SuperModel, Sharded, Counts]:
    """Once for each plan: the process group stays."""
    counts = Counts()
    device = torch.device("cpu")
    mesh = shard_mesh(plan, device)
    model, sharded = load_sharded(
        BaseSpec(model=path), device, mesh, counts=counts, kept_layers=plan.kept_layers
    )
    with sharded.building():
        super_model = SuperModel(model, per_sequence=exact)
        sharded.serve(super_model)
    return super_model, sharded, counts


def new_driver(name: str, rows: Sequence[TokenSequence] | None = None) -> JobDriver:
    return JobDriver(spec_of(name), rows or ROWS[name], HELD_OUT)


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
    rank, world = dist.get_rank(), dist.get_world_size()
    sharded, counts = None, Counts()
    if plan.fsdp > 1:
        model, sharded, counts = sharded_model(path, plan, exact)
        assert not model.jobs
    else:
        model = SuperModel(base_model(), per_sequence=exact)
    before = counts.as_json()

    def spans(name: str) -> bool:
        return plan.adapters == "data_parallel" or name in plan.spread

    def is_here(name: str) -> bool:
        return spans(name) or list(STEPS).index(name) % world == rank

    engine = GroupEngine(
        model,
        budget_tokens=budget,
        bucket_step=None if exact else 32,
        counts=counts,
        sharded=sharded,
        spans=spans,
        exact=exact,
        controller=controller_of(controller) if controller and rank == 0 else None,
    )
    watcher = Seen(engine)
    coming = dict(late or {})
    turn = 0
    budgets: list[tuple[int, int]] = []

    def arrive(name: str) -> JobDriver:
        driver = new_driver(name)
        driver.attach(engine, model.new_adapter(driver.spec))
        return driver

    def between(loop: GroupLoop) -> bool:
        nonlocal turn
        name = coming.pop(turn, None)
        turn += 1
        if engine.verdict is not None:
            budgets.append((engine.verdict.budget, engine.budget_tokens))
        if name is not None and is_here(name):
            loop.enter(arrive(name))
        engine.check_integrity()
        if poison is not None and poison[:2] == (rank, turn) and poison[2] in engine.jobs:
            next(iter(model.views(poison[2]).values())).grad.fill_(float("inf"))
        return bool(coming)

    undo, breaks = [], []
    if twin is not None:
        undo.append(break_twin(twin))
    if break_pass is not None and break_pass[0] == rank:
        undo.append(break_at(engine, *break_pass[1:], fault, breaks))
    try:
        run_group(
            engine, [arrive(name) for name in first if is_here(name)], watcher, between=between
        )
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
        budgets=budgets,
        kept_layers=kept_layers,
        actions=[each.action.value for each in watcher.decisions],
    )


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


def controller_of(name: str) -> Controller:
    """ "stepping" takes another size after every nano-batch, whatever was measured."""
    sizes = ladder(64, 256)
    settings = ControllerSettings(sizes=sizes, start=192, idle=192, limit=256, warm_ups=0)

    class Stepping(Controller):
        def observe(self, measure: Measure) -> tuple[Decision, ...]:
            self.best = sizes[(sizes.index(self.best) + 2) % len(sizes)]
            return ()

    return Stepping(settings) if name == "stepping" else Controller(settings)


def less(after: dict[str, dict[str, int]], before: dict[str, dict[str, int]]) -> Any:
    found = {}
    for purpose, tally in after.items():
        old = before.get(purpose, {})
        left = {name: value - old.get(name, 0) for name, value in tally.items()}
        if left["calls"]:
            found[purpose] = left
    return found


def break_at(engine: GroupEngine, number: int, place: str, fault: str, breaks: list[str]):
    """An exception in the middle of the forward or the backward of the first training nano-batch
    with work from that number on; with `fault` "joining" of the first one without. "memory" makes
    it one for want of that, "joining, memory" both, and a job's name one for want of memory in
    every nano-batch of that job. "ending": before the nano-batch of the turn at which all are
    through with the last evaluation of a job that spans ranks."""
    from tlora.model.linear import SharedInput

    seen = {"passes": 0, "inside": False}
    original_launch, original_join = engine._launch, engine._join_without_work
    middle = engine.super_model.groups[len(engine.super_model.groups) // 2]
    original = SharedInput._compute
    joining = fault.startswith("joining")
    for_ever = fault in STEPS
    error: Exception = RuntimeError("broken on purpose")
    if for_ever or fault.endswith("memory"):
        error = torch.OutOfMemoryError("out of memory on purpose")

    def launch(launched, composition):
        seen["passes"] += 1
        jobs = [pick.job for pick in composition.picks]
        if fault == "ending" and not breaks and ends_now(engine):
            breaks.append(place)
            raise error
        seen["inside"] = fault in ("", "memory") or fault in jobs
        try:
            original_launch(launched, composition)
        finally:
            seen["inside"] = False

    def join(kind):
        seen["passes"] += 1
        seen["inside"] = joining
        try:
            original_join(kind)
        finally:
            seen["inside"] = False

    def fail(*_) -> None:
        raise error

    def compute(self, x):
        outputs = original(self, x)
        due = seen["inside"] and seen["passes"] >= number and outputs[0].requires_grad
        if self is middle and due and (for_ever or not breaks):
            breaks.append(place)
            if place == "forward":
                fail()
            outputs[0].register_hook(fail)
        return outputs

    engine._launch, engine._join_without_work = launch, join
    SharedInput._compute = compute

    def undo() -> None:
        SharedInput._compute = original

    return undo


def ends_now(engine: GroupEngine) -> bool:
    """Some job that spans ranks has come to its end, by the last agreement."""
    assert engine.verdict is not None
    return any(
        standing is Standing.READY and engine.step(job.name) == STEPS[job.name]
        for job, standing in zip(engine._spanning(), engine.verdict.standings, strict=True)
    )


def break_twin(twin: str):
    """Something about jobs that span ranks is done wrong; how to set it right again."""
    from tlora.training import group_engine, optimiser

    right_sum, right_norm = group_engine.sum_in_order, optimiser.gradient_norm
    right_own = group_engine.Part.own

    def twice(tensors, figures, **settings):
        sums = right_sum(tensors, figures, **settings)
        for tensor in tensors:
            tensor *= dist.get_world_size()
        return sums

    def not_at_all(tensors, figures, **settings):
        return right_sum([], figures, **settings)

    norms: list[torch.Tensor] = []

    def of_one_rank(tensors, figures, **settings):
        if tensors:
            norms.append(torch.linalg.vector_norm(torch.stack([t.norm() for t in tensors])))
        return right_sum(tensors, figures, **settings)

    def all_of_it(self, lengths, *, first):
        return [True] * len(lengths)

    if twin == "summed twice":
        group_engine.sum_in_order = twice
    elif twin == "not summed":
        group_engine.sum_in_order = not_at_all
    elif twin == "norm of one rank":
        group_engine.sum_in_order = of_one_rank
        optimiser.gradient_norm = lambda rows: norms.pop(0) if norms else right_norm(rows)
    elif twin == "every rank runs all":
        group_engine.Part.own = all_of_it
    else:
        raise ValueError(twin)

    def undo() -> None:
        group_engine.sum_in_order, optimiser.gradient_norm = right_sum, right_norm
        group_engine.Part.own = right_own

    return undo


def watched(**settings: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """Train in a group: what it says of its communication, and the collectives that were called."""
    calls: dict[str, int] = {}
    passes = {"forward": 0, "train": 0}
    judge = lock_step.judge

    def counted(name: str, call):
        def run(*arguments, **options):
            calls[name] = calls.get(name, 0) + 1
            return call(*arguments, **options)

        return run

    def judged(reduced, last):
        verdict = judge(reduced, last)
        if verdict.kind is not None and not verdict.over:
            passes[verdict.kind.value] += 1
        return verdict

    names = {
        "all_gather_into_tensor": "all_gather",
        "all_gather_single": "all_gather",
        "all_reduce": "all_reduce",
        **{
            each: each
            for each in ("broadcast", "reduce", "gather", "all_gather", "all_to_all", "scatter")
        },
        "all_to_all_single": "all_to_all",
        "reduce_scatter_tensor": "reduce_scatter",
        "reduce_scatter_single": "reduce_scatter",
    }
    names = {name: kind for name, kind in names.items() if hasattr(dist, name)}
    kept = {name: getattr(dist, name) for name in names}
    if settings["plan"].fsdp > 1:
        # Made before, for that gathers too; and nothing is left gathered by others.
        sharded_model(settings["path"], settings["plan"], False)[1].reset()
    try:
        for name, kind in names.items():
            setattr(dist, name, counted(kind, kept[name]))
        lock_step.judge = judged
        told = train_in_group(**settings)
    finally:
        lock_step.judge = judge
        for name, call in kept.items():
            setattr(dist, name, call)
    told.counts["control"]["passes"] = passes  # type: ignore[assignment]
    return told.counts, calls


def sums_by_rank() -> dict[str, Any]:
    """Random parts on each rank, summed by `sum_in_order` and by adding all of them up here."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shapes = ((3, 17), (1,), (5, 7, 3), (101,))

    def parts_of(number: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        return [
            torch.randn(shape, generator=generator)
            * 10 ** (4 * torch.rand(shape, generator=generator))
            for shape in shapes
        ]

    everybody = [parts_of(number) for number in range(world)]
    figures = [[0.1 * (number + 1), 1e9 + number / 3] for number in range(world)]
    counts = Counts()
    own = parts_of(rank)
    sums = sum_in_order(own, figures[rank], counts=counts)
    tally = counts.as_json()["gradient"]

    def added(order: Sequence[int]) -> list[torch.Tensor]:
        total = [part.clone() for part in everybody[order[0]]]
        for number in order[1:]:
            for so_far, part in zip(total, everybody[number], strict=True):
                so_far += part
        return total

    return {
        "same": all(map(torch.equal, own, added(range(world)))),
        "other order": all(map(torch.equal, own, added(range(world)[::-1]))),
        "figures": sums == [sum(each) for each in zip(*figures, strict=True)],
        "calls": tally["calls"],
        "bytes": tally["num_bytes"],
        "own bytes": sum(4 * part.numel() for part in own),
    }


def adapter_numbers(name: str) -> int:
    """How many a job's adapter has."""
    weights = SuperModel(base_model()).new_adapter(spec_of(name))
    return sum(pair.a.numel() + pair.b.numel() for pair in weights.values())


def missing_after_break(path: str) -> int:
    """Gatherings that were made up for, on this rank, when the forward of one broke off."""
    plan = Plan(bucket=192, fsdp=2, adapters="rank_local")
    _, sharded, _ = sharded_model(path, plan, False)
    catch_up, missing = sharded.catch_up, [0]

    def counted() -> None:
        missing[0] += len(sharded._pass) - sharded._issued
        catch_up()

    sharded.catch_up = counted
    try:
        train_in_group(plan, path=path, first=("one", "odd"), break_pass=(1, 3, "forward"))
    finally:
        sharded.catch_up = catch_up
    return missing[0]


def save_variant(kind: str, path: Any) -> None:
    """A tiny base of some kind."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2 if "compiled" in kind else 3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=kind == "tied",
        attention_bias=kind == "biased",
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config)
    if kind == "biased":
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    model.to(torch.bfloat16 if kind == "bfloat16" else torch.float32).save_pretrained(path)


@contextmanager
def traced_layers() -> Iterator[None]:
    """Layers are traced as for compiling, and run by torch's own kernels."""
    kept = super_model.compile_layers
    super_model.compile_layers = lambda model: compiling.compile_layers(model, backend="aot_eager")
    try:
        yield
    finally:
        super_model.compile_layers = kept


def same_in_shards(kind: str, path: str) -> dict[str, bool]:
    """A model in shards beside the whole one."""
    with traced_layers():
        (losses, gradients), (expected, own) = shards_beside_whole(kind, path, torch.device("cpu"))
    return {
        "losses": torch.equal(losses, expected),
        "gradients": all(map(torch.equal, gradients, own)),
        "refuses": not torch.equal(losses * (1 + 1e-6), expected) and any(map(torch.any, own)),
    }


def shards_beside_whole(
    kind: str, path: str, device: torch.device
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Losses and gradients of both, forward and backward, twice. One rank gathers from nobody, and
    goes through the rest."""
    counts, alone = Counts(), dist.get_world_size() == 1
    half = device.type == "cuda" and "compiled" in kind
    base = BaseSpec(model=path, dtype="bfloat16" if half else "auto")
    mesh = shard_mesh(Plan(bucket=64, fsdp=dist.get_world_size()), device)
    kept = {"kept": 3, "kept in part": 1, "kept, checkpointed": 2, "kept, compiled": 1}.get(kind, 0)
    loaded, sharded = load_sharded(base, device, mesh, counts=counts, kept_layers=kept)
    settings = {
        "gradient_checkpointing": "checkpointed" in kind,
        "compiled": "compiled" in kind,
    }
    with sharded.building():
        model = SuperModel(loaded, **settings)
        sharded.serve(model)
    whole = SuperModel(load_base(base, device), **settings)
    share = Share("odd", [TokenSequence(*2 * [np.arange(4, 30, dtype=np.int32)])], [0], [1.0], 7)
    batch = pack([share], 32, device)
    found: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for each in (model, whole):
        each.attach("odd", each.new_adapter(spec_of("odd")), scale=1.0, dropout=0.1)
        for rows in each.views("odd").values():
            generator = torch.Generator().manual_seed(3)
            rows.value.copy_(torch.randn(rows.value.shape, generator=generator))
        each.refresh_operands()
        # Every kind of pass is traced by itself, which takes its time.
        for train in (True, True) if "compiled" in kind else (True, False, True):
            if each is model and not alone:
                sharded.begin(Pass.TRAIN if train else Pass.FORWARD)
            with torch.set_grad_enabled(train), each.routed(batch, train=train):
                losses = each.token_losses(batch)
                if train:
                    torch.autograd.backward(losses, torch.ones_like(losses))
            if each is model and not alone:
                sharded.end()
        gradients = [rows.grad.clone() for rows in each.views("odd").values()]
        found.append((losses.detach(), gradients))
    return found


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


def compared(*, buckets: list[int], attempts: list[int]) -> tuple[str, bool] | str:
    """Of ranks with these plans, which launchers have started so often."""
    from tlora.runtime.group.as_rank import compare

    rank = dist.get_rank()
    try:
        return tuple(compare(Plan(bucket=buckets[rank], replicas=2), attempts[rank]))
    except SpecError as error:
        return str(error)
