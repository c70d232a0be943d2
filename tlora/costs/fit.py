"""Parameters from measured points: non-negative, by relative error, with an error on points that
the fit never saw.

The model is homogeneous in its parameters, so at any of them its gradient times them is the time:
a Gauss-Newton step is then one non-negative least squares problem, `gradient x new = measured`.
"""

from collections.abc import Sequence

import numpy as np

from tlora.core.errors import SpecError
from tlora.costs.model import FLAT, NanoBatch, NanoBatchTime, StepTime, gradient, predicted

SHARPNESS = (2.0, 4.0, 8.0, 16.0)
"""Tried in turn; the one that suits the fitted points is taken."""

STARTS = (0.05, 0.5, 1.0)
"""The flat part to start from, in units of the fastest point: the fit may end in another place."""

ROUNDS = 60
HALVINGS = 12


def non_negative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least |matrix x - target| (Lawson and Hanson's active sets)."""
    # Columns differ by many orders of magnitude.
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    count = scaled.shape[1]
    x = np.zeros(count)
    free = np.zeros(count, dtype=bool)
    tolerance = 1e-12 * max(1.0, float(np.abs(scaled.T @ target).max()))
    for _ in range(10 * count):
        slope = scaled.T @ (target - scaled @ x)
        slope[free] = -np.inf
        if slope.max() <= tolerance:
            break
        free[int(slope.argmax())] = True
        while free.any():
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            negative = free & (trial <= 0)
            if not negative.any():
                x = trial
                break
            # As far as the first of them that reaches zero, which is then held there.
            step = np.min(x[negative] / np.maximum(x[negative] - trial[negative], 1e-300))
            x = x + step * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
    return x / scale


def fit_time(batches: Sequence[NanoBatch], seconds: Sequence[float]) -> NanoBatchTime:
    """Raises if there are fewer points than parameters."""
    features = np.array([batch.features for batch in batches], dtype=float)
    measured = np.array(seconds, dtype=float)
    if len(features) == 0 or len(features) <= features.shape[1]:
        raise SpecError(
            f"{len(features)} points are too few for a fit; give it more time or smaller "
            "nano-batches",
            field="--seconds",
        )
    found = [
        (_loss(theta, features, measured, sharpness), sharpness, theta)
        for sharpness in SHARPNESS
        for start in STARTS
        for theta in [_gauss_newton(features, measured, sharpness, start)]
    ]
    _, sharpness, theta = min(found, key=lambda each: each[:2])
    names = [name for name in NanoBatchTime.__slots__ if name != "sharpness"]
    return NanoBatchTime(**dict(zip(names, map(float, theta), strict=True)), sharpness=sharpness)


def fit_steps(
    jobs: Sequence[float], parameters: Sequence[float], seconds: Sequence[float]
) -> StepTime:
    """From rounds of steps in which so many jobs with so many parameters in all took part."""
    measured = np.array(seconds, dtype=float)
    features = np.stack([np.ones(len(measured)), np.array(jobs), np.array(parameters)], axis=1)
    found = non_negative_least_squares(features / measured[:, None], np.ones(len(measured)))
    return StepTime(pass_s=float(found[0]), job_s=float(found[1]), parameter_s=float(found[2]))


def mean_error_pct(predictions: Sequence[float], measured: Sequence[float]) -> float:
    """The mean of |predicted / measured - 1|, in percent."""
    ratios = np.array(predictions, dtype=float) / np.array(measured, dtype=float)
    return float(np.abs(ratios - 1).mean() * 100)


def _gauss_newton(
    features: np.ndarray, measured: np.ndarray, sharpness: float, start: float
) -> np.ndarray:
    """Every point counts by its relative error: small nano-batches matter as much as large ones."""
    theta = np.zeros(features.shape[1])
    theta[FLAT] = start * measured.min()
    largest = int(measured.argmax())
    theta[FLAT + 1] = measured[largest] / features[largest, FLAT + 1]
    loss = _loss(theta, features, measured, sharpness)
    for _ in range(ROUNDS):
        slopes = gradient(theta, features, sharpness) / measured[:, None]
        aim = non_negative_least_squares(slopes, np.ones(len(measured)))
        for halving in range(HALVINGS):
            trial = theta + (aim - theta) / 2**halving
            trial_loss = _loss(trial, features, measured, sharpness)
            if trial_loss < loss:
                break
        else:
            return theta
        done = loss - trial_loss < 1e-10 * loss
        theta, loss = trial, trial_loss
        if done:
            return theta
    return theta


def _loss(theta: np.ndarray, features: np.ndarray, measured: np.ndarray, sharpness: float) -> float:
    return float(((predicted(theta, features, sharpness) / measured - 1) ** 2).sum())
