"""The settings that a sweep tries: points of a grid, or drawn at random from a generator handed in.

A field with a condition has a value only where the condition holds; elsewhere the trial keeps the
task's own.
"""

import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from tlora.core.errors import SpecError
from tlora.core.sweep import AxisSpec, Params

MOST_TRIALS = 100_000
"""A grid beyond this is a mistake."""

MOST_LISTED = 8
"""Values of a field that a message names."""


def takes_part(axis: AxisSpec, chosen: Params) -> bool:
    """Its conditions hold for what was chosen before it."""
    return all(chosen.get(when.field) in when.values for when in axis.when)


def ordered(space: Sequence[AxisSpec]) -> list[AxisSpec]:
    """Every field after those that its conditions name. Raises SpecError where there is no such
    order, or a condition names a field that is not tried."""
    names = {axis.field for axis in space}
    for axis in space:
        for when in axis.when:
            if when.field not in names:
                raise SpecError(
                    f"when: '{when.field}' is no field of the space",
                    field=f"search.space.{axis.field}",
                )
    _check_conditions(space)
    left, found = list(space), list[AxisSpec]()
    while left:
        placed = {axis.field for axis in found}
        ready = [axis for axis in left if all(when.field in placed for when in axis.when)]
        if not ready:
            raise SpecError(
                "its conditions lead back to itself", field=f"search.space.{left[0].field}"
            )
        found += ready
        left = [axis for axis in left if axis not in ready]
    return found


def _check_conditions(space: Sequence[AxisSpec]) -> None:
    """Raises SpecError where a condition waits for values that the other field never has."""
    tried = {axis.field: axis for axis in space if axis.kind in ("values", "integer")}
    for axis in space:
        for when in axis.when:
            other = tried.get(when.field)
            if other is None:
                continue
            every = _whole(other) if other.kind == "integer" else other.values
            if not any(value in every for value in when.values):
                listed = ", ".join(str(value) for value in every[:MOST_LISTED])
                more = ", ..." if len(every) > MOST_LISTED else ""
                never = " or ".join(str(value) for value in when.values)
                raise SpecError(
                    f"when: {when.field} is never {never}; it is one of {listed}{more}",
                    field=f"search.space.{axis.field}",
                )


def sample(space: Sequence[AxisSpec], draw: Random) -> Params:
    """One trial. Every field draws, whether it takes part or not, so that the values of one do not
    depend on the conditions of another."""
    chosen: Params = {}
    for axis in ordered(space):
        value = _drawn(axis, draw)
        if takes_part(axis, chosen):
            chosen[axis.field] = value
    return _in_order(space, chosen)


def grid(space: Sequence[AxisSpec], trials: int | None) -> list[Params]:
    """Every point, the first field slowest. Raises SpecError where it cannot be laid out, or is
    larger than `trials`."""
    axes = ordered(space)
    values = _grid_values(axes, trials)
    points: list[Params] = []
    for point in _points(axes, values, {}):
        points.append(_in_order(space, point))
        if len(points) > MOST_TRIALS:
            raise SpecError(f"the grid has more than {MOST_TRIALS:,} points", field="search.space")
    if trials is not None and len(points) > trials:
        raise SpecError(
            f"is {trials}, and the grid has {len(points)} points; raise it, take values out, or "
            "use sampler random",
            field="search.trials",
        )
    return points


def _points(
    axes: Sequence[AxisSpec], values: dict[str, list[Any]], chosen: Params
) -> Iterator[Params]:
    if not axes:
        yield chosen
        return
    axis, rest = axes[0], axes[1:]
    if not takes_part(axis, chosen):
        yield from _points(rest, values, chosen)
        return
    for value in values[axis.field]:
        yield from _points(rest, values, chosen | {axis.field: value})


def _grid_values(axes: Sequence[AxisSpec], trials: int | None) -> dict[str, list[Any]]:
    """Ranges that do not say how many points they have share what the others leave of `trials`."""
    values = {axis.field: points(axis, axis.points) for axis in axes if _is_laid_out(axis)}
    open_axes = [axis for axis in axes if axis.field not in values]
    if not open_axes:
        return values
    if trials is None:
        raise SpecError(
            "a grid needs to know how many points of a range it takes: add points, or set "
            "search.trials",
            field=f"search.space.{open_axes[0].field}",
        )
    fixed = math.prod(len(each) for each in values.values())
    each = int((trials / fixed) ** (1 / len(open_axes)) + 1e-9)
    if each < 2:
        raise SpecError(
            f"is {trials}, which leaves a grid less than two points of "
            f"{open_axes[0].field}; raise it, or use sampler random",
            field="search.trials",
        )
    return values | {axis.field: points(axis, each) for axis in open_axes}


def _is_laid_out(axis: AxisSpec) -> bool:
    return axis.kind == "values" or axis.points is not None


def every_value(axis: AxisSpec) -> list[Any]:
    """Of a list or of whole numbers; other ranges have too many."""
    return list(_whole(axis)) if axis.kind == "integer" else list(axis.values)


def points(axis: AxisSpec, count: int | None) -> list[Any]:
    """Evenly spaced over the range, ends included, on its own scale."""
    if axis.kind == "values":
        return list(axis.values)
    assert count is not None
    if axis.kind == "integer":
        return _whole_points(axis, count)
    shares = [at / (count - 1) for at in range(count)]
    # The ends as they were written, not as a logarithm gives them back.
    inner = [_at(axis, share) for share in shares[1:-1]]
    return [axis.low, *inner, axis.high]


def _whole_points(axis: AxisSpec, count: int) -> list[int]:
    every = _whole(axis)
    if count >= len(every):
        return list(every)
    places = [round(at * (len(every) - 1) / (count - 1)) for at in range(count)]
    return [every[place] for place in dict.fromkeys(places)]


def _whole(axis: AxisSpec) -> range:
    return range(int(axis.low), int(axis.high) + 1, axis.step)


def _drawn(axis: AxisSpec, draw: Random) -> Any:
    share = draw.random()
    if axis.kind == "values":
        return axis.values[int(share * len(axis.values))]
    if axis.kind == "integer":
        every = _whole(axis)
        return every[int(share * len(every))]
    return _at(axis, share)


def _at(axis: AxisSpec, share: float) -> float:
    if axis.kind == "log":
        low, high = math.log(axis.low), math.log(axis.high)
        value = math.exp(low + share * (high - low))
    else:
        value = axis.low + share * (axis.high - axis.low)
    # Six digits are plenty to tell settings apart, and can be typed.
    return float(f"{value:.6g}")


def _in_order(space: Sequence[AxisSpec], chosen: Params) -> Params:
    """As the file lists them."""
    return {axis.field: chosen[axis.field] for axis in space if axis.field in chosen}
