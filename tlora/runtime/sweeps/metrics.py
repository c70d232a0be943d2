"""What the trials of a sweep may be compared by."""

from tlora.training.driver import JobDriver
from tlora.training.outcome import EvaluationDone


def trial_metrics(
    driver: JobDriver, done: EvaluationDone | None, grad_norm: float | None
) -> dict[str, float]:
    """At an evaluation, or at the end of a trial that has no held-out rows."""
    figures = done.figures if done is not None else {}
    values = {
        **{f"eval_{name}": value for name, value in figures.items()},
        "eval_loss": done.loss if done is not None else None,
        "loss": driver.mean_loss if done is None else driver.recent_loss,
        "grad_norm": grad_norm,
    }
    return {name: value for name, value in values.items() if value is not None}
