"""The whole benchmark: choose what was left open, look before allocating, warm up, measure.

Settings in, a `Result` out; what it looks like is the business of table.py and record.py.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers.modeling_utils import PreTrainedModel

from tlora.core.errors import ModelError, SpecError
from tlora.model.loading import resolve_device
from tlora.model.memory import is_out_of_memory
from tlora.model.super_model import SuperModel
from tlora.model.targets import choose_targets
from tlora.runtime.benchmark import frozen, linears, machine, peft_arm, shapes
from tlora.runtime.benchmark.arms import (
    Counter,
    Pauses,
    pauses,
    train_one_at_a_time,
    train_together,
)
from tlora.runtime.benchmark.linears import LinearTime
from tlora.runtime.benchmark.phases import clocked_phases
from tlora.runtime.benchmark.rounds import Arm, Rounds, run_rounds
from tlora.runtime.benchmark.settings import NAMED_LENGTHS, Settings, read_lengths
from tlora.runtime.benchmark.shapes import Shape
from tlora.runtime.benchmark.workload import Done, Workload, new_workload
from tlora.runtime.budget import ON_CPU, ON_CPU_SMALL, ON_CUDA
from tlora.runtime.environment import quieten_libraries

CLOCKED_RUNS = 3

Say = Callable[[str], None]

FUSED = "fused"
ONE_AT_A_TIME = "one at a time"
PEFT = {"padded": "PEFT, padded", "packed": "PEFT, packed"}
PLAIN = {"padded": "frozen, padded", "packed": "frozen, packed"}
# In the layout that is faster without: compiling takes long.
COMPILED = {"padded": "frozen, compiled, padded", "packed": "frozen, compiled, packed"}
OWN = "frozen, own"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What was measured. Rates are useful tokens per second; None where there is no figure."""

    settings: Settings
    shape: Shape
    device: torch.device
    work: Workload
    rounds: Rounds
    nano_batches: int
    """Of one fused run."""

    engine_overhead_pct: float | None
    linears: list[LinearTime]
    pauses: Pauses
    peak_bytes: int | None
    gemm_flops_per_s: float
    copy_bytes_per_s: float
    notes: list[str]

    def rate(self, *arms: str) -> float | None:
        """Of the fastest of these; None if none of them ran."""
        ran = [self.rounds.median(arm) for arm in arms if arm in self.rounds.seconds]
        return self.work.tokens / min(ran) if ran else None

    def required_rate(self, arm: str) -> float:
        return self.work.tokens / self.rounds.median(arm)

    @property
    def fused(self) -> float:
        return self.required_rate(FUSED)

    @property
    def one_at_a_time(self) -> float:
        return self.required_rate(ONE_AT_A_TIME)

    @property
    def peft(self) -> float | None:
        return self.rate(*PEFT.values())

    @property
    def frozen(self) -> float:
        """The fastest frozen backbone."""
        return max(
            self.work.tokens / self.rounds.median(arm)
            for arm in (*PLAIN.values(), *COMPILED.values(), OWN)
            if arm in self.rounds.seconds
        )

    @property
    def ratio_peft(self) -> float | None:
        return self.fused / self.peft if self.peft else None

    @property
    def ratio_one_at_a_time(self) -> float:
        return self.fused / self.one_at_a_time

    @property
    def frozen_fraction(self) -> float:
        return self.fused / self.frozen

    @property
    def step_ms(self) -> float:
        """Of a nano-batch with everything that belongs to it."""
        return self.rounds.median(FUSED) / self.nano_batches * 1e3

    @property
    def mfu(self) -> float:
        """Forward and dX are two FLOPs each per weight and token; weights get no gradient."""
        return 4 * self.shape.matmul_parameters * self.fused / self.gemm_flops_per_s


def run_benchmark(settings: Settings, say: Say) -> Result:
    """Raises SpecError for whatever was asked for and cannot be done here."""
    doing = "loading"

    def remember(text: str) -> None:
        nonlocal doing
        doing = text
        say(text)

    try:
        return _run(settings, remember)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise SpecError(
            f"out of memory ({doing}); take fewer tokens a nano-batch, smaller batches, shorter "
            "sequences or a smaller shape",
            field="--budget",
        ) from None


def _run(settings: Settings, say: Say) -> Result:
    quieten_libraries()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = chosen_device(settings.device)
    settings = with_defaults(settings, device)
    assert settings.shape and settings.budget
    shape = shapes.look_at(settings.shape, settings.dtype, device)
    work = workload_for(settings, shape)
    total_rank = sum(job.lora.r for job in work.jobs)
    shapes.check_room(shape, device, budget_tokens=settings.budget, total_rank=total_rank)
    say(f"{shape.name}: {shape.parameters:,} parameters, loading")
    model = shapes.load(shape, device)
    gemm, copies = machine.gemm_flops_per_s(device, shape.dtype), machine.copy_bytes_per_s(device)

    say("warming up: fused")
    counter = Counter()
    with machine.peak_memory(device) as peak:
        # Rows for all jobs and one more, so that no pool grows under the clock.
        reserve = total_rank + max(job.lora.r for job in work.jobs)
        compiled = device.type == "cuda" and not settings.skip_compile
        ours = SuperModel(shapes.twin(model), reserve_rows=reserve, compiled=compiled)
        train_together(ours, work, work.jobs, settings.budget, counter)
    arms, notes = warm_arms(settings, model, ours, work, say)
    whole, tokens = work.of(work.jobs), Done(work.tokens, len(work.sequences), steps=0)
    rounds = run_rounds(
        arms,
        repeats=settings.repeats,
        expected={name: tokens if name.startswith("frozen") else whole for name in arms},
        say=say,
    )

    say("the engine's own work, single linears, pauses")
    return Result(
        settings=settings,
        shape=shape,
        device=device,
        work=work,
        rounds=rounds,
        nano_batches=counter.nano_batches,
        engine_overhead_pct=engine_overhead_pct(ours, work, settings.budget),
        linears=linears.measure(ours, work, budget_tokens=settings.budget, copy_bytes_per_s=copies),
        pauses=pauses(ours, work, settings.budget),
        peak_bytes=peak.bytes,
        gemm_flops_per_s=gemm,
        copy_bytes_per_s=copies,
        notes=notes,
    )


def chosen_device(name: str) -> torch.device:
    try:
        return resolve_device(name)
    except ModelError as error:
        # Said of a job file's field, and there is none here.
        raise SpecError(str(error).removeprefix("engine.device: "), field="--device") from None


def with_defaults(settings: Settings, device: torch.device) -> Settings:
    on_cuda = device.type == "cuda"
    shape = settings.shape or ("llama-1b" if on_cuda else "demo")
    demo = shape == "demo"
    return replace(
        settings,
        shape=shape,
        lengths=settings.lengths or (NAMED_LENGTHS if demo else "512"),
        steps=settings.steps or (12 if demo else 6),
        budget=settings.budget or (ON_CUDA if on_cuda else ON_CPU_SMALL if demo else ON_CPU),
        threads=settings.threads or torch.get_num_threads(),
    )


def workload_for(settings: Settings, shape: Shape) -> Workload:
    """Raises if the base cannot carry it."""
    assert settings.lengths and settings.steps
    lengths = read_lengths(settings.lengths)
    if shape.positions is not None and max(lengths) > shape.positions:
        raise SpecError(
            f"{max(lengths)} tokens are more than the {shape.positions} positions of {shape.name}",
            field="--lengths",
        )
    work = new_workload(
        num_jobs=settings.jobs,
        ranks=settings.ranks,
        batches=settings.batch,
        lengths=lengths,
        steps=settings.steps,
        dropout=settings.dropout,
        vocabulary=shape.vocabulary,
    )
    for job in work.jobs:
        try:
            choose_targets(job, {target.path: target for target in shape.targets})
        except SpecError as error:
            raise SpecError(error.message, field="--ranks") from None
    return work


def warm_arms(
    settings: Settings, model: PreTrainedModel, ours: SuperModel, work: Workload, say: Say
) -> tuple[dict[str, Arm], list[str]]:
    """All arms in the order of a round, each run before; and why any is left out."""
    assert settings.budget
    budget = settings.budget
    notes: list[str] = []
    arms: dict[str, Arm] = {
        FUSED: lambda: train_together(ours, work, work.jobs, budget),
        ONE_AT_A_TIME: lambda: train_one_at_a_time(ours, work, budget),
    }
    if settings.skip_peft:
        notes.append("PEFT was left out on request")
    elif not peft_arm.is_available():
        notes.append("PEFT is not installed, so its row is left out: pip install peft")
    else:
        base = shapes.twin(model)
        for how, name in PEFT.items():
            arms[name] = peft_one_by_one(base, work, packed=how == "packed")
    arms[OWN] = frozen.OwnFrozen(ours, work, budget)
    plain = shapes.twin(model)
    for how, name in PLAIN.items():
        arms[name] = frozen.PlainFrozen(plain, work, budget, packed=how == "packed")
    for name, arm in arms.items():
        # It has run already, to see what memory it takes.
        if name != FUSED:
            say(f"warming up: {name}")
            arm()
    if not settings.skip_compile:
        how = min(PLAIN, key=lambda how: arms[PLAIN[how]]().seconds)
        say(f"compiling the frozen layers, {settings.compile_seconds} s at most")
        twin = shapes.twin(model)
        arm = frozen.PlainFrozen(twin, work, budget, packed=how == "packed")
        reason = frozen.why_not_compiled(
            twin, arm, settings.compile_seconds, dynamic=arm.shapes_vary
        )
        if reason is None:
            arms[COMPILED[how]] = arm
        else:
            notes.append(f"frozen, compiled: {reason}")
    return arms, notes


def engine_overhead_pct(model: SuperModel, work: Workload, budget_tokens: int) -> float | None:
    """The median of a few runs; None if the engine no longer calls what the clocks are put on."""
    shares: list[float] = []
    for _ in range(CLOCKED_RUNS):
        with clocked_phases(model) as phases:
            run = train_together(model, work, work.jobs, budget_tokens)
        share = phases.overhead_pct(run.seconds)
        if share is None:
            return None
        shares.append(share)
    return statistics.median(shares)


def peft_one_by_one(base: PreTrainedModel, work: Workload, *, packed: bool) -> Arm:
    return lambda: peft_arm.train_one_by_one(base, work, packed=packed)
