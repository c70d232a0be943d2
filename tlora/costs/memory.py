"""The memory of a group: what can be counted, and what a nano-batch takes on top of it.

    bytes = weights + adapters (counted) + fixed + row x rows + reserve

A logits' chunk, workspaces and tables do not grow with the nano-batch: they are in `fixed`.
`reserve` is the most by which any measured nano-batch, fitted or held out, was above the line, so
that the prediction is a bound on all that was seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tlora.costs.fit import non_negative_least_squares

BYTES_PER_ADAPTER_PARAMETER = 18
"""A float32 weight, its gradient and two moments; and the copy in half precision that kernels read,
which a CPU does not have: there it is an eighth too much."""

GRADIENT_BYTES = 4
"""Of a parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """On a CPU there is no peak to measure, and all that is not counted is None."""

    weights_bytes: int
    """Of the frozen base."""

    device_bytes: int | None
    """What the device has."""

    outside_bytes: int | None
    """Taken on the device by its context and by others when the profile was made."""

    fixed_bytes: float | None
    row_bytes: float | None
    reserve_bytes: float | None

    def adapters_bytes(self, parameters: float) -> float:
        return BYTES_PER_ADAPTER_PARAMETER * parameters

    def bytes(self, *, rows: float, adapter_parameters: float) -> float | None:
        """At the peak; None where it was not measured."""
        if self.fixed_bytes is None or self.row_bytes is None or self.reserve_bytes is None:
            return None
        return (
            self.weights_bytes
            + self.adapters_bytes(adapter_parameters)
            + self.fixed_bytes
            + self.row_bytes * rows
            + self.reserve_bytes
        )

    @property
    def usable_bytes(self) -> int | None:
        if self.device_bytes is None:
            return None
        return self.device_bytes - (self.outside_bytes or 0)


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    rows: float
    peak_bytes: float
    """Beyond weights and adapters."""

    heldout: bool


def fit_memory(
    points: Sequence[MemoryPoint],
    *,
    weights_bytes: int,
    device_bytes: int | None,
    outside_bytes: int | None,
) -> Memory:
    """Without points all that is not counted stays unknown. Of nano-batches of one size the one
    that took the most stands for all: a captured graph takes its memory where nothing counts it."""
    counted = Memory(
        weights_bytes=weights_bytes,
        device_bytes=device_bytes,
        outside_bytes=outside_bytes,
        fixed_bytes=None,
        row_bytes=None,
        reserve_bytes=None,
    )
    most: dict[float, float] = {}
    for point in points:
        most[point.rows] = max(point.peak_bytes, most.get(point.rows, 0.0))
    points = [replace(point, peak_bytes=most[point.rows]) for point in points]
    fitted = [point for point in points if not point.heldout]
    if len({point.rows for point in fitted}) < 2:
        return counted
    features = np.array([(1.0, point.rows) for point in fitted])
    fixed, per_row = non_negative_least_squares(
        features, np.array([point.peak_bytes for point in fitted], dtype=float)
    )
    above = max(point.peak_bytes - fixed - per_row * point.rows for point in points)
    return Memory(
        weights_bytes=weights_bytes,
        device_bytes=device_bytes,
        outside_bytes=outside_bytes,
        fixed_bytes=float(fixed),
        row_bytes=float(per_row),
        reserve_bytes=max(0.0, float(above)),
    )
