"""Landscapes with everything drawn: where the peak is, its shape, the noise, what a first
nano-batch costs, and when the peak moves. They show a rule that fits only those of landscapes.py.
"""

import math
from collections.abc import Callable
from random import Random

from tlora.runtime.benchmark.landscapes import (
    HIGH,
    LOW,
    RECORDED,
    SIZES,
    Landscape,
    launch_bound,
    moved,
    recorded,
    slowing,
)

FAMILIES = (
    "moves",
    "moves with the group",
    "noisy",
    "peak",
    "flat",
    "rises",
    "recorded",
    "memory",
    "groups",
)

DEPTH = 2.5
"""The worst size has e^-2.5 of the best rate, a twelfth."""


def drawn(family: str, number: int, *, name: str = "landscape") -> Landscape:
    """Another `name` is another set of landscapes."""
    draw = Random(f"{name} {family} {number}")
    noise = draw.uniform(0.06, 0.14) if family == "noisy" else _spread(draw, 0.002, 0.05)
    rate, sizes, limit, told = _peak(draw, _place(draw)), SIZES, HIGH, None
    changes: tuple[float, ...] = ()
    match family:
        case "moves" | "moves with the group":
            at = draw.uniform(0.2, 0.8)
            rate = _moving(draw, at)
            changes = (at,) if family != "moves" else ()
        case "flat":
            rate = launch_bound(round(_spread(draw, 1, 1500)), 18_000.0)
        case "rises":
            rate = launch_bound(round(_spread(draw, 3000, 12_000)))
        case "recorded":
            known = recorded(draw.choice(list(RECORDED)))
            rate, sizes, limit = known.rate, known.sizes, known.limit
        case "memory":
            limit = draw.choice([size for size in SIZES if size >= 2560])
            told = draw.choice([None, limit])
        case "groups":
            changes = tuple(sorted(draw.random() for _ in range(draw.randint(2, 15))))
        case _:
            pass
    pace = draw.choice([0.0, 0.0, 0.05, -0.03])
    return Landscape(
        name=f"{family} {number}",
        rate=slowing(rate, pace, draw.uniform(0.01, 0.2)),
        sizes=sizes,
        limit=limit,
        told_limit=told,
        noise=noise,
        stumbles=draw.choice([0.0, 0.0, 0.0, 0.01, 0.04]),
        changes=changes,
        warm_up=draw.uniform(1.5, 6.0),
    )


def _spread(draw: Random, low: float, high: float) -> float:
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def _place(draw: Random) -> float:
    return _spread(draw, LOW, HIGH)


def _moving(draw: Random, at: float) -> Callable[[int, float], float]:
    """By three quarters of a doubling at least."""
    first, then = _place(draw), _place(draw)
    while abs(math.log2(then / first)) < 0.75:
        then = _place(draw)
    return moved(_peak(draw, first), _peak(draw, then), at)


def _peak(draw: Random, peak: float) -> Callable[[int, float], float]:
    """Three shapes: a parabola at the top, another power and width to each side, and launches
    below with a slow decline above."""
    top = draw.uniform(15_000.0, 30_000.0)
    kind = draw.randrange(3)
    width, ratio = draw.uniform(1.5, 4.0), 1.0 if kind == 0 else draw.uniform(0.5, 2.0)
    power = 2.0 if kind == 0 else draw.uniform(1.2, 3.5)
    decline = draw.uniform(0.0, 0.15)
    launches = launch_bound(round(peak / 1.5), top)

    def rate(size: int, done: float) -> float:
        distance = math.log2(size / peak)
        if kind == 2:
            return launches(size, done) * math.exp(-decline * max(0.0, distance))
        fall = abs(distance / (width if distance < 0 else width * ratio)) ** power
        return top * math.exp(-DEPTH * fall / (fall + DEPTH))

    return rate
