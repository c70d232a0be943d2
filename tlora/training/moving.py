"""A job's state out of an engine and into one, without holding up its neighbours.

To move a job: `Engine.snapshot`, `Engine.detach`, and in the other engine `bring`, `keep_rows`, and
`Engine.attach` with what was brought while the berth is held.
"""

from collections.abc import Iterable, Iterator

import torch

from tlora.model.adapters import AdapterWeights, LoraPair
from tlora.model.berth import Berth
from tlora.model.job_rows import Held, of_weights
from tlora.model.snapshot import Snapshot
from tlora.model.super_model import SuperModel
from tlora.training.checks import check_state
from tlora.training.engine_job import JobState


def snapshot(model: SuperModel, job: str, *, step: int) -> Snapshot[JobState]:
    def state_of(held: Held) -> JobState:
        return JobState(step, of_weights(held), held["exp_avg"], held["exp_avg_sq"])

    return model.snapshot(job, state_of, moments=True)


def bring_weights(model: SuperModel, job: str, weights: AdapterWeights) -> Snapshot[AdapterWeights]:
    """The start of a job's adapter where the model is: attaching it takes no copy from the host
    then. Weights that are no finite numbers raise JobFailed, at once or when the result is asked
    for."""

    def adapter(there: list[torch.Tensor]) -> AdapterWeights:
        model.adapter_rows.check_numbers(job, weights)
        return _paired(weights, iter(there))

    return model.bring(_matrices(weights), adapter)


def bring(model: SuperModel, job: str, state: JobState) -> Snapshot[JobState]:
    """The same with the optimiser's moments, for a job that goes on."""
    weights, exp_avg, exp_avg_sq = state.weights, state.exp_avg, state.exp_avg_sq

    def there(tensors: list[torch.Tensor]) -> JobState:
        model.adapter_rows.check_numbers(job, weights)
        found = iter(tensors)
        return JobState(
            state.step,
            _paired(weights, found),
            {name: next(found) for name in exp_avg},
            {name: next(found) for name in exp_avg_sq},
        )

    return model.bring([*_matrices(weights), *exp_avg.values(), *exp_avg_sq.values()], there)


def keep_rows(model: SuperModel, job: str, state: JobState) -> Berth | None:
    """Rows for a job that goes on with this state, which was brought, by any thread
    (`SuperModel.keep_rows`)."""
    check_state(job, state.weights, state)
    return model.keep_rows(job, state.weights, state.moments)


def _matrices(weights: AdapterWeights) -> list[torch.Tensor]:
    """B turned as a pool holds it: so it goes there without a step of its own."""
    return [each for pair in weights.values() for each in (pair.a, pair.b.t())]


def _paired(paths: Iterable[str], there: Iterator[torch.Tensor]) -> AdapterWeights:
    return {path: LoraPair(a=next(there), b=next(there).t()) for path in paths}
