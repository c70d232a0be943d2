"""A device with known costs, and the points that a profile would measure on it."""

import numpy as np

from tlora.costs.fit import fit_steps, fit_time, mean_error_pct
from tlora.costs.memory import Memory
from tlora.costs.model import NanoBatch, NanoBatchTime, Segment, StepTime
from tlora.costs.profile import Point, Profile
from tlora.runtime.profiling.grid import RANKS, choose_plans, dealt

# Like an 8B model on a large GPU: launches hide what is below some 1,500 tokens.
TIME = NanoBatchTime(
    fixed_s=4e-3,
    segment_s=5e-4,
    flat_s=7e-2,
    row_s=5.2e-5,
    square_s=2e-9,
    lora_s=4e-6,
    rank_s=5e-8,
    sharpness=8.0,
)
STEPS = StepTime(pass_s=1e-3, job_s=2e-3, parameter_s=8e-12)
PARAMETERS_PER_RANK = 2_600_000
WEIGHTS_BYTES = 16 * 10**9


def known_points(
    *, noise_pct: float, time: NanoBatchTime = TIME, steps: StepTime = STEPS, seed: int = 0
) -> list[Point]:
    """The grid of a real profile, timed by the model itself with noise on top."""
    generator = np.random.Generator(np.random.PCG64(seed))
    plans = choose_plans(
        largest=16_384, positions=131_072, generator=np.random.Generator(np.random.PCG64(0))
    )
    ranks = [*RANKS, 1]

    def noisy(seconds: float) -> float:
        return seconds * float(np.exp(generator.normal(0, noise_pct / 100)))

    points: list[Point] = []
    for plan in plans:
        segments = tuple(
            Segment(sum(lengths), ranks[place], 1.0 if place < len(RANKS) else 0.003)
            for place, lengths in dealt(plan.lengths, plan.team).items()
        )
        squares = sum(length**2 for length in plan.lengths)
        batch = NanoBatch(plan.rows, squares, segments)
        parameters = round(
            sum(each.rank * each.coverage for each in segments) * PARAMETERS_PER_RANK
        )
        points.append(
            Point(
                batch=batch,
                adapter_parameters=parameters,
                seconds=noisy(time.seconds(batch)),
                spread_pct=noise_pct,
                repeats=3,
                step_seconds=noisy(
                    steps.seconds(passes=1, jobs=len(segments), parameters=parameters)
                ),
                peak_bytes=round(noisy(10**9 + 3e6 * plan.rows)),
                heldout=plan.heldout,
            )
        )
    return points


def new_profile(*, noise_pct: float = 0.0, budget_tokens: int = 8192) -> Profile:
    points = known_points(noise_pct=noise_pct)
    fitted = [point for point in points if not point.heldout]
    heldout = [point for point in points if point.heldout]
    time = fit_time([point.batch for point in fitted], [point.seconds for point in fitted])
    return Profile(
        device="a device",
        dtype="bfloat16",
        shape="llama-8b",
        versions={"tlora": "0", "cuda": None},
        points=tuple(points),
        time=time,
        steps=fit_steps(
            [len(point.batch.segments) for point in fitted],
            [point.adapter_parameters for point in fitted],
            [point.step_seconds for point in fitted],
        ),
        memory=Memory(
            weights_bytes=WEIGHTS_BYTES,
            device_bytes=80 * 10**9,
            outside_bytes=10**9,
            fixed_bytes=10**9,
            row_bytes=3e6,
            reserve_bytes=2 * 10**8,
        ),
        heldout_error_pct=mean_error_pct(
            [time.seconds(point.batch) for point in heldout], [each.seconds for each in heldout]
        ),
        parameters_per_rank=PARAMETERS_PER_RANK,
        budget_tokens=budget_tokens,
        buckets=tuple(budget_tokens * part // 16 for part in (2, 4, 8, 12, 16)),
        attach_s=0.02,
        detach_s=0.03,
        warmup_s=11.0,
    )
