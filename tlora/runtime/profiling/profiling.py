"""The whole profile: load, warm up, measure in random order, fit, check on what was held out."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tlora.core.errors import JobFailed, SpecError
from tlora.costs.fit import fit_steps, fit_time, mean_error_pct
from tlora.costs.memory import Memory, MemoryPoint, fit_memory
from tlora.costs.model import NanoBatchTime, StepTime
from tlora.costs.profile import Point, Profile, Skipped
from tlora.model.memory import is_out_of_memory
from tlora.model.super_model import SuperModel
from tlora.runtime.benchmark import machine, record, shapes
from tlora.runtime.benchmark.bench import chosen_device
from tlora.runtime.benchmark.rounds import spread_pct
from tlora.runtime.benchmark.shapes import Shape
from tlora.runtime.benchmark.steadiness import BEFORE_CAPTURE
from tlora.runtime.benchmark.workload import new_workload
from tlora.runtime.budget import ON_CPU, ON_CPU_SMALL, ON_CUDA, default_budget
from tlora.runtime.environment import quieten_libraries
from tlora.runtime.profiling.grid import EIGHT, RANKS, Plan, choose_plans, lengths_within, whole
from tlora.runtime.profiling.group_check import check_group
from tlora.runtime.profiling.rig import NotMeasured, Rig, Visit
from tlora.runtime.profiling.settings import Settings
from tlora.runtime.threads import set_threads
from tlora.training.compose import buckets_for
from tlora.training.sizing import CPU_BUCKET_STEP

PAUSE_RANK = 16
PAUSES = 6
"""The first one warms up."""

WARM_UP_FACTOR = 2.0
"""Warming up may take so many times as long as measuring: compilers are slow, but not for ever."""

FEWEST_POINTS = 10

SEED = 0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """All looks at one nano-batch."""

    warm_up: tuple[Visit, ...]
    visits: tuple[Visit, ...]


def run_profile(settings: Settings, command: str, say: Say) -> Profile:
    """Raises SpecError for whatever was asked for and cannot be done here."""
    try:
        return _run(settings, command, say)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise SpecError(
            "out of memory before anything was measured; take a smaller shape or --dtype bfloat16",
            field="--shape",
        ) from None


def _run(settings: Settings, command: str, say: Say) -> Profile:
    quieten_libraries()
    set_threads(settings.threads)
    device = chosen_device(settings.device)
    settings = with_defaults(settings, device)
    assert settings.shape and settings.tokens
    shape = shapes.look_at(settings.shape, settings.dtype, device)
    generator = np.random.Generator(np.random.PCG64(SEED))
    plans = choose_plans(largest=settings.tokens, positions=shape.positions, generator=generator)
    ranks = [min(rank, largest_rank(shape)) for rank in RANKS]
    reserved = sum(ranks) + 1 + PAUSE_RANK
    plans, too_large = within_memory(plans, shape, device, ranks, reserved)

    say(f"{shape.name}: {shape.parameters:,} parameters, loading")
    started = machine.now(device)
    base = shapes.load(shape, device)
    weights = weights_bytes(base)
    # As in training.
    model = SuperModel(base, reserve_rows=reserved, compiled=device.type == "cuda")
    load_s = machine.now(device) - started

    say("the first nano-batch")
    rig = Rig(model, ranks=ranks, weights_bytes=weights, reserved_rank=reserved)
    budget = default_budget(device, shape.parameters)
    bucket_step = CPU_BUCKET_STEP if device.type == "cpu" else None
    warmup_s = first_seconds(rig, shape, min(budget, settings.tokens))
    measured_plans, left_out = measure(
        rig,
        plans,
        seconds=settings.seconds,
        repeats=settings.repeats,
        generator=generator,
        say=say,
    )
    points = [point_of(rig, plan, measured) for plan, measured in measured_plans.items()]
    times, steps, error_pct = fit(points, left_out)
    say("attaching and detaching")
    attach_s, detach_s = pauses(rig, shape, smallest(list(measured_plans)))
    profile = Profile(
        device=machine.device_name(device),
        dtype=str(shape.dtype).removeprefix("torch."),
        shape=shape.name,
        versions=record.versions(),
        points=tuple(points),
        skipped=(*too_large, *left_out),
        time=times,
        steps=steps,
        memory=memory_of(points, weights, device),
        heldout_error_pct=error_pct,
        parameters_per_rank=rig.parameters_per_rank,
        budget_tokens=budget,
        buckets=buckets_for(budget, step=bucket_step),
        bucket_step=bucket_step,
        attach_s=attach_s,
        detach_s=detach_s,
        warmup_s=warmup_s,
        load_s=load_s,
        noise_pct=noise_pct(points),
        commit=record.commit(),
        command=command,
        notes=notes_of(device),
    )
    say("a group of jobs, against its prediction")
    rig.empty()
    return with_group_check(profile, model, shape)


def first_seconds(rig: Rig, shape: Shape, tokens: int) -> float:
    """Of a nano-batch of all jobs, with whatever is compiled for it."""
    length = lengths_within(shape.positions, tokens)[1]
    try:
        return rig.visit(Plan(tokens, whole(tokens, length), EIGHT, heldout=False)).seconds
    except NotMeasured as error:
        raise SpecError(
            f"a nano-batch of {tokens} tokens does not run: {error}; take fewer", field="--tokens"
        ) from None


def fit(
    points: Sequence[Point], left_out: Sequence[Skipped]
) -> tuple[NanoBatchTime, StepTime, float]:
    """Parameters of nano-batches and steps from the points that may be fitted, and the error of
    the former, in percent, on the others."""
    fitted = [point for point in points if not point.heldout]
    heldout = [point for point in points if point.heldout]
    if not heldout or len(fitted) < FEWEST_POINTS:
        reasons = dict.fromkeys(each.reason for each in left_out)
        raise SpecError(
            f"{len(fitted)} nano-batches to fit and {len(heldout)} to check are too few "
            f"({', '.join(reasons) or 'the grid is small'}); give it more time, or other --tokens",
            field="--seconds",
        )
    times = fit_time([point.batch for point in fitted], [point.seconds for point in fitted])
    steps = fit_steps(
        [len(point.batch.segments) for point in fitted],
        [point.adapter_parameters for point in fitted],
        [point.step_seconds for point in fitted],
    )
    predicted = [times.seconds(point.batch) for point in heldout]
    return times, steps, mean_error_pct(predicted, [point.seconds for point in heldout])


def pauses(rig: Rig, shape: Shape, plan: Plan) -> tuple[float, float]:
    """Medians for one more job, between nano-batches."""
    spec = new_workload(
        num_jobs=1,
        ranks=(min(PAUSE_RANK, largest_rank(shape)),),
        batches=(1,),
        lengths=(2,),
        steps=1,
        dropout=0.0,
        vocabulary=shape.vocabulary,
    ).jobs[0]
    attach, detach = rig.pauses(spec, plan, repeats=PAUSES)
    return statistics.median(attach[1:]), statistics.median(detach[1:])


def with_group_check(profile: Profile, model: SuperModel, shape: Shape) -> Profile:
    """What was measured so far is not lost if the group does not run, or would run for long."""
    lengths = lengths_within(shape.positions, profile.budget_tokens)
    try:
        check = check_group(model, profile, lengths=lengths, largest_rank=largest_rank(shape))
    except (JobFailed, NotMeasured) as error:
        return replace(profile, notes=(*profile.notes, f"no group was trained: {error}"))
    return replace(profile, group_check=check)


def with_defaults(settings: Settings, device: torch.device) -> Settings:
    on_cuda = device.type == "cuda"
    shape = settings.shape or ("llama-1b" if on_cuda else "demo")
    on_cpu = ON_CPU_SMALL if shape == "demo" else ON_CPU
    return replace(
        settings, shape=shape, tokens=settings.tokens or (2 * ON_CUDA if on_cuda else on_cpu)
    )


def within_memory(
    plans: list[Plan], shape: Shape, device: torch.device, ranks: list[int], reserved: int
) -> tuple[list[Plan], list[Skipped]]:
    """A device that is full says so and goes on, a host does not: there, nano-batches that may
    not fit are left out before. Raises if not even the smallest fits."""
    shapes.check_room(shape, device, budget_tokens=smallest(plans).rows, total_rank=reserved)
    free = machine.free_bytes(device)
    if device.type == "cuda" or free is None:
        return plans, []

    def fits(plan: Plan) -> bool:
        return shape.needed_bytes(budget_tokens=plan.rows, total_rank=reserved) <= free

    return (
        [plan for plan in plans if fits(plan)],
        [left_out(plan, ranks, "may not fit into memory") for plan in plans if not fits(plan)],
    )


def measure(
    rig: Rig,
    plans: Sequence[Plan],
    *,
    seconds: float,
    repeats: int,
    generator: np.random.Generator,
    say: Say,
) -> tuple[dict[Plan, Measured], list[Skipped]]:
    """Every plan a few times to warm up, then rounds over all of them, each in an order of its own,
    so that a machine that gets slower does so for all alike."""
    ranks = [job.rank for job in rig.jobs]
    warm: dict[Plan, list[Visit]] = {}
    skipped: dict[Plan, str] = {}
    too_many = float("inf")

    def shuffled(chosen: Sequence[Plan]) -> list[Plan]:
        return [chosen[place] for place in generator.permutation(len(chosen)).tolist()]

    def attempt(plan: Plan, expected_seconds: float | None) -> Visit | None:
        nonlocal too_many
        if plan.rows >= too_many:
            skipped[plan] = "out of memory"
            return None
        # A second time without the graphs that were captured so far, and their memory.
        for _ in range(2):
            try:
                return rig.visit(plan, expected_seconds=expected_seconds)
            except NotMeasured as error:
                skipped[plan] = str(error)
                if skipped[plan] != "out of memory":
                    return None
        too_many = plan.rows
        return None

    def visited(plan: Plan, expected_seconds: float | None = None) -> Visit | None:
        """As the nano-batch runs from then on: it may be captured once it has run a few times."""
        visit = None
        for _ in range(BEFORE_CAPTURE):
            visit = attempt(plan, expected_seconds)
            if visit is None:
                break
            skipped.pop(plan, None)
            if rig.model.settled:
                break
            warm.setdefault(plan, []).append(visit)
        return visit

    say(f"warming up: {len(plans)} nano-batches")
    limit = time.monotonic() + WARM_UP_FACTOR * seconds
    for plan in shuffled(plans):
        if time.monotonic() > limit:
            skipped[plan] = "no time left to warm it up"
        elif (visit := visited(plan)) is not None:
            warm.setdefault(plan, []).append(visit)
    visits: dict[Plan, list[Visit]] = {plan: [] for plan in warm}
    limit = time.monotonic() + seconds
    for number in range(1, repeats + 1):
        if time.monotonic() > limit:
            break
        say(f"round {number} of {repeats}")
        for plan in shuffled([plan for plan in warm if plan not in skipped]):
            if time.monotonic() > limit:
                break
            quickest = min(seen.seconds for seen in (*warm[plan], *visits[plan]))
            if (visit := visited(plan, quickest)) is not None:
                visits[plan].append(visit)
    for plan, seen in visits.items():
        if not seen:
            skipped.setdefault(plan, "no time left to measure it")
    return (
        {
            plan: Measured(tuple(warm[plan]), tuple(visits[plan]))
            for plan in plans
            if visits.get(plan) and plan not in skipped
        },
        [left_out(plan, ranks, reason) for plan, reason in skipped.items()],
    )


def left_out(plan: Plan, ranks: Sequence[int], reason: str) -> Skipped:
    # The bare job is not among the ranks asked for, and has rank 1.
    named = [*ranks, 1]
    return Skipped(
        rows=plan.rows,
        length=plan.longest,
        ranks=tuple(named[place] for place in plan.team),
        reason=reason,
    )


def point_of(rig: Rig, plan: Plan, measured: Measured) -> Point:
    seconds = [visit.seconds for visit in measured.visits]
    # A captured graph allocates nothing that is counted: before it was captured, it did.
    peaks = [
        visit.peak_bytes
        for visit in (*measured.warm_up, *measured.visits)
        if visit.peak_bytes is not None
    ]
    return Point(
        batch=rig.shape_of(plan),
        adapter_parameters=rig.parameters_of(plan),
        seconds=statistics.median(seconds),
        spread_pct=spread_pct(seconds) if len(seconds) > 1 else None,
        repeats=len(seconds),
        step_seconds=statistics.median(visit.step_seconds for visit in measured.visits),
        peak_bytes=max(peaks) if peaks else None,
        heldout=plan.heldout,
    )


def memory_of(points: Sequence[Point], weights: int, device: torch.device) -> Memory:
    total = outside = None
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)
    return fit_memory(
        [
            MemoryPoint(point.batch.rows, point.peak_bytes, point.heldout)
            for point in points
            if point.peak_bytes is not None
        ],
        weights_bytes=weights,
        device_bytes=total,
        outside_bytes=outside,
    )


def noise_pct(points: Sequence[Point]) -> float | None:
    """The median spread; None if nothing was repeated."""
    spreads = [point.spread_pct for point in points if point.spread_pct is not None]
    return statistics.median(spreads) if spreads else None


def weights_bytes(model: torch.nn.Module) -> int:
    """Tied ones count once."""
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def largest_rank(shape: Shape) -> int:
    return min(min(target.in_features, target.out_features) for target in shape.targets)


def smallest(plans: Sequence[Plan]) -> Plan:
    return min(plans, key=lambda plan: (plan.rows, plan.longest))


def notes_of(device: torch.device) -> tuple[str, ...]:
    if device.type == "cuda":
        return ()
    return ("memory was counted for weights and adapters only: a CPU shows no peak of a step",)
