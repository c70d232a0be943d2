"""The whole benchmark: choose what was left open, look before allocating, warm up, measure.

Settings in, a `Result` out; what it looks like is the business of table.py and record.py. Whatever
was measured when the time was over is a result.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from tlora.core.errors import ModelError, SpecError
from tlora.model.loading import resolve_device
from tlora.model.memory import is_out_of_memory
from tlora.model.targets import choose_targets
from tlora.runtime.benchmark import linears, machine, peft_arm, shapes
from tlora.runtime.benchmark.arms import PAUSES, Pauses, pauses, train_together
from tlora.runtime.benchmark.linears import LinearTime
from tlora.runtime.benchmark.lineup import (
    COMPILED,
    FUSED,
    FUSED_SPREAD,
    ONE_AT_A_TIME,
    OWN,
    PEFT,
    PEFT_SPREAD,
    PLAIN,
    Lineup,
    new_lineup,
)
from tlora.runtime.benchmark.phases import clocked_phases, marked_phases
from tlora.runtime.benchmark.rounds import Rounds, run_rounds
from tlora.runtime.benchmark.settings import ARMS, NAMED_LENGTHS, Settings, read_lengths
from tlora.runtime.benchmark.shapes import Shape
from tlora.runtime.benchmark.steadiness import Graphs
from tlora.runtime.benchmark.workload import Done, Workload, new_workload
from tlora.runtime.budget import ON_CPU, ON_CPU_SMALL, ON_CUDA
from tlora.runtime.environment import quieten_libraries
from tlora.runtime.threads import set_threads

CLOCKED_RUNS = 3

SHARE_OF_ROUNDS = 0.85
"""Of the time of a benchmark with a limit; pauses, linears and phases are looked at in the rest."""

Say = Callable[[str], None]
T = TypeVar("T")


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

    graphs: Graphs
    engine_overhead_pct: float | None
    device_waits_pct: float | None
    linears: list[LinearTime]
    """Empty if there was no time for them."""

    pauses: Pauses | None
    peak_bytes: int | None
    gemm_flops_per_s: float
    copy_bytes_per_s: float
    notes: list[str]
    complete: bool
    """Neither time nor memory ran out."""

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
    def one_at_a_time(self) -> float | None:
        return self.rate(ONE_AT_A_TIME)

    @property
    def peft(self) -> float | None:
        return self.rate(*PEFT.values())

    @property
    def fused_spread(self) -> float | None:
        """In processes of one thread, as many as threads."""
        return self.rate(FUSED_SPREAD)

    @property
    def peft_spread(self) -> float | None:
        """Jobs one by one in each of as many processes."""
        return self.rate(*PEFT_SPREAD.values())

    @property
    def frozen(self) -> float | None:
        """The fastest frozen backbone."""
        return self.rate(*PLAIN.values(), *COMPILED.values(), OWN)

    @property
    def ratio_peft(self) -> float | None:
        return self.fused / self.peft if self.peft else None

    @property
    def ratio_peft_spread(self) -> float | None:
        """Ours in processes over PEFT one by one, which has the same threads in one process."""
        return self.fused_spread / self.peft if self.fused_spread and self.peft else None

    @property
    def ratio_both_spread(self) -> float | None:
        spread = self.peft_spread
        return self.fused_spread / spread if self.fused_spread and spread else None

    @property
    def ratio_one_at_a_time(self) -> float | None:
        return self.fused / self.one_at_a_time if self.one_at_a_time else None

    @property
    def frozen_fraction(self) -> float | None:
        return self.fused / self.frozen if self.frozen else None

    @property
    def step_ms(self) -> float:
        """Of a nano-batch with everything that belongs to it."""
        return self.rounds.median(FUSED) / self.nano_batches * 1e3

    @property
    def mfu(self) -> float:
        """Forward and dX are two FLOPs each per weight and token; weights get no gradient."""
        return 4 * self.shape.matmul_parameters * self.fused / self.gemm_flops_per_s


def run_benchmark(settings: Settings, say: Say, *, started: float | None = None) -> Result:
    """Raises SpecError for whatever was asked for and cannot be done here. A limit counts from
    `started` on time.monotonic, else from now."""
    started = time.monotonic() if started is None else started
    doing = "loading"

    def remember(text: str) -> None:
        nonlocal doing
        doing = text
        say(text)

    try:
        return _run(settings, remember, started)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise SpecError(
            f"out of memory ({doing}); take fewer tokens a nano-batch, smaller batches, shorter "
            "sequences or a smaller shape",
            field="--budget",
        ) from None


def _run(settings: Settings, say: Say, started: float) -> Result:
    seconds = settings.seconds or float("inf")
    quieten_libraries()
    set_threads(settings.threads)
    device = chosen_device(settings.device)
    settings = with_defaults(settings, device)
    assert settings.shape and settings.budget
    shape = shapes.look_at(settings.shape, settings.dtype, device)
    work = workload_for(settings, shape)
    shapes.check_room(shape, device, budget_tokens=settings.budget, total_rank=work.total_rank)
    say(f"{shape.name}: {shape.parameters:,} parameters, loading")
    model = shapes.load(shape, device)
    gemm, copies = machine.gemm_flops_per_s(device, shape.dtype), machine.copy_bytes_per_s(device)

    say("warming up: fused")
    with machine.peak_memory(device) as peak:
        until = started + SHARE_OF_ROUNDS * seconds
        lineup = new_lineup(settings, model, work, until=until)
        lineup.warm_fused()
    kinds, notes = chosen_kinds(settings)
    arms = lineup.arms(kinds)
    whole, tokens = work.of(work.jobs), Done(work.tokens, len(work.sequences), steps=0)
    rounds = run_rounds(
        arms,
        repeats=settings.repeats,
        expected={name: tokens if name.startswith("frozen") else whole for name in arms},
        say=say,
        until=lineup.until,
    )
    lineup.close()
    after = _AfterRounds(lineup, say, started + seconds, notes)
    on_gpu = device.type == "cuda"
    waits_pct = after.measured("the device's waits", after.waits_pct) if on_gpu else None
    overhead_pct = after.measured("the engine's own work", after.overhead_pct)
    pauses_seen = after.measured("pauses", after.pauses)
    linears_seen = after.measured("single linears", lambda: after.linears(copies)) or []
    if set(PEFT.values()) <= set(rounds.out_of_memory):
        # Beside our model there was no room; nothing of ours is measured any more.
        alone = after.measured("PEFT by itself", lambda: after.peft_alone(whole))
        rounds = rounds.followed_by(alone) if alone else rounds
    if lineup.peft_under_autocast:
        notes.append("PEFT ran under autocast, which is faster here")
    return Result(
        settings=settings,
        shape=shape,
        device=device,
        work=work,
        rounds=rounds,
        nano_batches=lineup.nano_batches,
        pauses=pauses_seen,
        linears=linears_seen,
        engine_overhead_pct=overhead_pct,
        device_waits_pct=waits_pct,
        graphs=lineup.graphs,
        peak_bytes=peak.bytes,
        gemm_flops_per_s=gemm,
        copy_bytes_per_s=copies,
        notes=[*notes, *rounds.notes],
        complete=after.complete and rounds.complete,
    )


@dataclass(slots=True)
class _AfterRounds:
    """What is looked at when the rounds are over, as far as the time goes."""

    lineup: Lineup
    say: Say
    end: float
    """On time.monotonic."""

    notes: list[str]
    """Of what was left out, and why."""

    complete: bool = True

    def measured(self, what: str, measure: Callable[[], T]) -> T | None:
        reason = "time was over"
        if time.monotonic() < self.end:
            self.say(what)
            try:
                return measure()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = "out of memory"
        self.notes.append(f"{what}: left out, {reason}")
        self.complete = False
        return None

    def pauses(self) -> Pauses:
        lineup = self.lineup
        with lineup.graphs.watched(len(lineup.work.jobs) + 2 * (PAUSES + 1)):
            return pauses(lineup.ours, lineup.work, lineup.budget, adapters=lineup.adapters)

    def linears(self, copy_bytes_per_s: float) -> list[LinearTime]:
        return linears.measure(
            self.lineup.ours,
            self.lineup.work,
            budget_tokens=self.lineup.budget,
            copy_bytes_per_s=copy_bytes_per_s,
            adapters=self.lineup.adapters,
        )

    def overhead_pct(self) -> float | None:
        return engine_overhead_pct(self.lineup, self.end)

    def waits_pct(self) -> float | None:
        return device_waits_pct(self.lineup, self.end)

    def peft_alone(self, whole: Done) -> Rounds:
        return run_rounds(
            self.lineup.alone("peft"),
            repeats=self.lineup.settings.repeats,
            expected=dict.fromkeys(PEFT.values(), whole),
            say=self.say,
            until=self.end,
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


def chosen_kinds(settings: Settings) -> tuple[list[str], list[str]]:
    """What there is to run of what was asked for, and notes on the rest."""
    kinds, notes = list(settings.kinds), []
    left_out = [kind for kind in ARMS if kind not in kinds]
    if left_out:
        notes.append(f"left out on request: {', '.join(left_out)}")
    if "peft" in kinds and not peft_arm.is_available():
        kinds.remove("peft")
        notes.append("PEFT is not installed, so its row is left out: pip install peft")
    return kinds, notes


def engine_overhead_pct(lineup: Lineup, until: float) -> float | None:
    """The median of a few runs, fewer if time is short; None if the engine no longer calls what
    the clocks are put on."""

    def share() -> float | None:
        with clocked_phases(lineup.ours) as phases:
            seconds = _fused_seconds(lineup)
        return phases.overhead_pct(seconds)

    return _median_of_runs(share, until)


def device_waits_pct(lineup: Lineup, until: float) -> float | None:
    """The part of a fused run in which the device had nothing to do between phases; the median of
    a few runs."""

    def share() -> float | None:
        with marked_phases(lineup.ours) as spans:
            _fused_seconds(lineup)
        return spans.waits_pct()

    return _median_of_runs(share, until)


def _fused_seconds(lineup: Lineup) -> float:
    work, adapters = lineup.work, lineup.adapters
    run = train_together(lineup.ours, work, work.jobs, lineup.budget, adapters=adapters)
    return run.seconds


def _median_of_runs(share: Callable[[], float | None], until: float) -> float | None:
    shares: list[float] = []
    for _ in range(CLOCKED_RUNS):
        found = share()
        if found is None:
            return None
        shares.append(found)
        if time.monotonic() > until:
            break
    return statistics.median(shares)
