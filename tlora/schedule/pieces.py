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
    tokens: float
    """Of a batch, by the user's own weight."""

    worth_s: float
    """GPUs' worth x seconds of one of its steps."""

    density: float
    """The same per token."""

    fair_gpus: float = 0.0
    limit_s: float = 0.0
    """The most seconds that a step may take: bound / fair rate."""

    weight: float = 0.0
    """Fair tokens per second: in a full nano-batch all jobs are slowed alike."""

    urgency: float = 0.0
    """How far its slowdown since it arrived, waiting included, presses on its bound."""

    rank: int = 0
    """In order of arrival."""


class Pieces:
    """Makes them every turn, and keeps what does not change between turns."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._kept: dict[str, Piece] = {}

    def of(self, state: State) -> dict[str, Piece]:
        """Of all runnable jobs, by name, in order of arrival."""
        fair = fair_gpus(state)
        credit = {tenant: credit_of(state, tenant) for tenant in state.due}
        result: dict[str, Piece] = {}
        kept = self._kept
        for rank, job in enumerate(state.runnable()):
            request = job.request
            name = request.name
            piece = kept.get(name)
            if piece is None or piece.job is not job:
                piece = new_piece(job, self.costs)
            solo_step_s = piece.figures.solo_step_s
            due = fair[name]
            fair_rate = due / piece.gpus / solo_step_s
            bound = request.slowdown_bound
            behind = (job.fair_s + FRESH_S) / (job.steps_done * solo_step_s + FRESH_S)
            piece.fair_gpus = due
            piece.limit_s = bound / fair_rate
            piece.weight = fair_rate * piece.tokens
            piece.urgency = behind / bound * credit.get(request.tenant, 1.0)
            piece.rank = rank
            result[name] = piece
        self._kept = result
        return dict(result)


def new_piece(job: JobState, costs: Costs) -> Piece:
    """With what depends on the turn left open."""
    request = job.request
    figures = costs.figures(request)
    worth_s = request.gpus * figures.solo_step_s
    return Piece(
        job=job,
        name=request.name,
        base=request.base,
        gpus=request.gpus,
        figures=figures,
        tokens=figures.batch_tokens * request.load.weight,
        worth_s=worth_s,
        density=worth_s / figures.batch_tokens,
    )


def pieces_of(state: State, costs: Costs) -> dict[str, Piece]:
    """Once."""
    return Pieces(costs).of(state)


def credit_of(state: State, tenant: str) -> float:
    """Above 1 for a tenant that was due more GPU-seconds than its jobs have held."""
    due = state.due.get(tenant, 0.0) + FRESH_S
    served = state.served.get(tenant, 0.0) + FRESH_S
    return min(CREDIT_LIMIT, max(1 / CREDIT_LIMIT, due / served))
