"""The jobs as grouping sees them: what each is due, how slow it may be, how urgent it is."""

from dataclasses import dataclass

from tlora.core.state import JobState, State
from tlora.costs.groups import Costs, JobFigures
from tlora.schedule.fairness import fair_gpus

FRESH_S = 300.0
"""Seconds of solo training that every job is taken to have been due and to have got: a job that
has just come is neither behind nor ahead."""

CREDIT_LIMIT = 2.0
"""A tenant that was served too little (too much) is more (less) urgent by at most this factor."""


@dataclass(slots=True, eq=False)
class Piece:
    job: JobState
    name: str
    base: str
    gpus: int
    figures: JobFigures
    fair_gpus: float
    limit_s: float
    """The most seconds that a step may take: bound / fair rate."""

    weight: float
    """Fair tokens per second: in a full nano-batch all jobs are slowed alike."""

    urgency: float
    """How far its slowdown since it arrived, waiting included, presses on its bound."""

    worth_s: float
    """GPUs' worth x seconds of one of its steps."""

    density: float
    """GPUs' worth x seconds per token."""

    rank: int
    """In order of arrival."""

    @property
    def fair_rate(self) -> float:
        return self.job.request.slowdown_bound / self.limit_s


def pieces_of(state: State, costs: Costs) -> dict[str, Piece]:
    """Of all runnable jobs, by name, in order of arrival."""
    fair = fair_gpus(state)
    credit = {tenant: credit_of(state, tenant) for tenant in state.due}
    result: dict[str, Piece] = {}
    for rank, job in enumerate(state.runnable()):
        request = job.request
        figures = costs.figures(request)
        due = fair[job.name]
        fair_rate = due / request.gpus / figures.solo_step_s
        got_s = job.steps_done * figures.solo_step_s
        behind = (job.fair_s + FRESH_S) / (got_s + FRESH_S)
        result[job.name] = Piece(
            job=job,
            name=job.name,
            base=request.base,
            gpus=request.gpus,
            figures=figures,
            fair_gpus=due,
            limit_s=request.slowdown_bound / fair_rate,
            weight=fair_rate * figures.batch_tokens * request.load.weight,
            urgency=behind / request.slowdown_bound * credit.get(request.tenant, 1.0),
            worth_s=request.gpus * figures.solo_step_s,
            density=request.gpus * figures.solo_step_s / figures.batch_tokens,
            rank=rank,
        )
    return result


def credit_of(state: State, tenant: str) -> float:
    """Above 1 for a tenant that was due more GPU-seconds than its jobs have held."""
    due = state.due.get(tenant, 0.0) + FRESH_S
    served = state.served.get(tenant, 0.0) + FRESH_S
    return min(CREDIT_LIMIT, max(1 / CREDIT_LIMIT, due / served))
