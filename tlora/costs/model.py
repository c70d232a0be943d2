"""The time of a nano-batch, and of the optimiser steps after it, from a few parameters.

    seconds = fixed + segment x segments + smooth max(flat, work)
    work    = row x rows + square x sum of length^2 + sum over segments of
              tokens x coverage x (lora + rank x r)

`flat` is what a nano-batch takes however small it is: streaming the weights once for each
direction, and launching every kernel. The device hides the smaller of the two behind the larger,
so LoRA and attention stand inside of the maximum: where launches dominate they cost nothing more.

Every parameter is a number of seconds, and the whole is homogeneous in them: twice the parameters,
twice the time. fit.py rests on that.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Segment:
    """What one job has in a nano-batch."""

    tokens: float
    rank: float
    coverage: float = 1.0
    """The part of all linears that the job adapts, by their widths: 1 is all-linear."""


@dataclass(frozen=True, slots=True)
class NanoBatch:
    rows: float
    """Tokens, and the padding up to the bucket."""

    squares: float
    """The sum of the squares of the sequences' lengths."""

    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> float:
        return sum(segment.tokens for segment in self.segments)

    @property
    def features(self) -> tuple[float, ...]:
        """What each of `NanoBatchTime.seconds_each` is multiplied with."""
        covered = [segment.tokens * segment.coverage for segment in self.segments]
        ranks = [segment.rank for segment in self.segments]
        return (
            1.0,
            float(len(self.segments)),
            1.0,
            self.rows,
            self.squares,
            sum(covered),
            sum(tokens * rank for tokens, rank in zip(covered, ranks, strict=True)),
        )


FLAT = 2
"""The place of the flat part among the features; what stands after it is work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NanoBatchTime:
    """Parameters of forward and backward, in seconds."""

    fixed_s: float
    """Always paid: what nothing hides."""

    segment_s: float
    """Per job in the nano-batch."""

    flat_s: float
    """Launches and streaming of the weights; the larger of this and the work counts."""

    row_s: float
    """Per row through the backbone where it is saturated."""

    square_s: float
    """Per squared token of a sequence, in attention."""

    lora_s: float
    """Per token with adapters on all linears, whatever the rank."""

    rank_s: float
    """Per token and unit of rank, on all linears."""

    sharpness: float
    """Of the smooth maximum: the exponent p of (flat^p + work^p)^(1/p)."""

    @property
    def seconds_each(self) -> tuple[float, ...]:
        """All but the sharpness, in the order of the features."""
        return astuple(self)[:-1]

    def seconds(self, batch: NanoBatch) -> float:
        return float(predicted(self.seconds_each, np.array([batch.features]), self.sharpness)[0])


def predicted(
    parameters: Sequence[float] | np.ndarray, features: np.ndarray, sharpness: float
) -> np.ndarray:
    """Seconds of each row of features."""
    return gradient(parameters, features, sharpness) @ np.asarray(parameters)


def gradient(
    parameters: Sequence[float] | np.ndarray, features: np.ndarray, sharpness: float
) -> np.ndarray:
    """d seconds / d parameters for each row of features. By Euler's theorem on homogeneous
    functions its product with the parameters is the time itself."""
    theta = np.asarray(parameters)
    flat = features[:, FLAT] * theta[FLAT]
    work = features[:, FLAT + 1 :] @ theta[FLAT + 1 :]
    largest = np.maximum(np.maximum(flat, work), np.finfo(float).tiny)
    # Scaled by the larger one, so that no power overflows or vanishes.
    norm = ((flat / largest) ** sharpness + (work / largest) ** sharpness) ** (1 / sharpness)
    norm = np.maximum(norm, np.finfo(float).tiny)
    result = features.astype(float, copy=True)
    result[:, FLAT] *= (flat / largest / norm) ** (sharpness - 1)
    result[:, FLAT + 1 :] *= ((work / largest / norm) ** (sharpness - 1))[:, None]
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Parameters of the optimiser steps that follow a nano-batch, in seconds."""

    pass_s: float
    """Per round of steps, however many jobs take part."""

    job_s: float
    """Per job that steps."""

    parameter_s: float
    """Per adapter parameter of a job that steps."""

    def seconds(self, *, passes: float, jobs: float, parameters: float) -> float:
        return passes * self.pass_s + jobs * self.job_s + parameters * self.parameter_s
