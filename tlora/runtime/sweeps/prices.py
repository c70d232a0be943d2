"""What the trials of a task take on one device, by the cost model: for the plan between tasks."""

from collections.abc import Sequence

from tlora.core.cluster import Tier
from tlora.core.plan import Plan
from tlora.core.request import JobRequest
from tlora.costs.groups import Costs
from tlora.runtime.sweeps.trials import MadeTrial

FORWARD_SHARE = 1 / 3
"""Of a training pass: an evaluation is without the backward pass, which is two of the three
products of a linear."""


def together_rate(requests: Sequence[JobRequest], costs: Costs, *, bucket: int) -> float:
    """Tokens per second of a device that trains all of these together."""
    weights = [request.load.weight for request in requests]
    return costs.predict(requests, weights, Plan(bucket=bucket), Tier.GPU).tokens_per_s


def tokens_with_evaluations(made: MadeTrial) -> float:
    """Of a whole trial, an evaluated token counted as the part of a trained one that it takes."""
    held_out, every = made.data.evaluation, made.job.eval.steps
    if held_out is None:
        return float(made.plan.total_tokens)
    times = 1 + (made.plan.total_steps // every if every else 1)
    tokens = float(held_out.lengths.sum()) * times
    return made.plan.total_tokens + FORWARD_SHARE * tokens
