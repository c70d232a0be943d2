"""What the trials of a sweep may be compared by."""

from tlora.training.driver import JobDriver


def trial_metrics(driver: JobDriver) -> dict[str, float]:
    """At an evaluation, or at the end of a trial that has no held-out rows."""
    evaluated = driver.is_just_evaluated
    values = {
        **{f"eval_{name}": value for name, value in driver.eval_figures.items()},
        "eval_loss": driver.eval_loss,
        "loss": driver.recent_loss if evaluated else driver.mean_loss,
        "grad_norm": driver.grad_norm,
    }
    return {name: value for name, value in values.items() if value is not None}
