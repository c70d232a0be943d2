"""The jobs as grouping sees them: what each is due, how slow it may be, how urgent it is; and what
several of them come to together.

What was asked of a piece or a load is kept with it, from turn to turn. Where dues change, what
depends on them is worked out again when it is next asked for (`Load.renew`); the rest stays.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tlora.core.state import GroupState, JobState, State
from tlora.costs.groups import Costs, JobFigures
from tlora.schedule.fairness import fair_gpus

FRESH_S = 300.0
"""Seconds of solo training that every job is taken to have been due and to have got, or what it
needs in all where that is less: a job that has just come is neither behind nor ahead, and a short
one is soon."""

CREDIT_LIMIT = 2.0
"""A tenant that was served too little (too much) is more (less) urgent by at most this factor."""

LIKE = 0.02
"""Jobs whose seconds differ by less are not worth a swap."""

MOST_KEPT = 64
"""Loads that one remembers of those with a job more or less."""


@dataclass(slots=True, eq=False)
class Priced:
    """Never changed; not frozen because it is made very often."""

    bucket: int
    worth: float
    breach: float
    """The largest slowdown / bound among the jobs: at most 1 where all bounds hold."""

    pressed: str
    """The job that has it."""

    memory_bytes: float
    fits: bool
    holds: bool
    """Memory and all bounds."""

    asked: int = 1
    """Buckets that were looked at for it."""

    @property
    def bound_by(self) -> str:
        """What forbids it, or would forbid more."""
        return f"slowdown of {self.pressed}" if self.fits else "memory"


class Whole(NamedTuple):
    """A round with every job's whole batch, so that all step together. It does not depend on what
    anybody is due."""

    bucket: int | None
    """None: no bucket holds it, and what follows is of no meaning."""

    seconds: float = 0.0
    worth: float = 0.0
    padding: float = 1.0
    """Rows for each token."""

    memory_bytes: float = 0.0
    fits: bool = True


@dataclass(slots=True, eq=False)
class Piece:
    job: JobState
    name: str
    base: str
    gpus: int
    figures: JobFigures
    worth_s: float
    """GPUs' worth x seconds of one of its steps."""

    density: float
    """The same per token."""

    rank: int
    """In order of arrival."""

    useful: int
    """GPUs that it could use alone: more than it has sequences are of no use."""

    share: tuple[float, float, float, float, float]
    """What it adds to a round with its whole batch: seconds beside the rows, sequences, seconds of
    its step, parameters, and `worth_s`."""

    looseness: float
    """Its bound x the user's own weight."""

    fresh_s: float
    """See `FRESH_S`; a start is part of what it needs."""

    credit: Mapping[str, float]
    """Of the tenants, by name; kept up to date by `Pieces`."""

    # What follows is of this turn.

    fair_gpus: float = 0.0
    limit_s: float = 0.0
    """The most seconds that a step may take: bound / fair rate."""

    rate: float = 0.0
    """Fair steps per second, by the user's own weight."""

    weight: float = 0.0
    """The same in tokens: in a full nano-batch all jobs are slowed alike."""

    needs: float = 0.0
    """GPUs without which no group can hold its bound, if predictions are right."""

    first_s: float = 0.0
    """Seconds for a batch at that rate."""

    strictness: float = 0.0
    """Its slowdown / its bound, at that rate."""

    load: "Load | None" = None
    """Of itself, once somebody asked."""

    dues: int = 0
    """Counts changes of anybody's due."""

    @property
    def urgency(self) -> float:
        """How far its slowdown since it arrived, waiting included, presses on its bound."""
        job = self.job
        request = job.request
        done_s = job.steps_done * self.figures.solo_step_s
        behind = (job.fair_s + self.fresh_s) / (done_s + self.fresh_s)
        return behind / request.slowdown_bound * self.credit.get(request.tenant, 1.0)

    @property
    def alone(self) -> "Load":
        """The load of this job by itself."""
        load = self.load
        if load is None:
            load = self.load = _load_of_one(self)
        elif load.dues != self.dues:
            load.renew()
        return load

    def is_like(self, other: "Piece") -> bool:
        """No group would notice much if one were there instead of the other: ranks may differ."""
        return (
            self.figures.batch_tokens == other.figures.batch_tokens
            and self.figures.longest == other.figures.longest
            and abs(self.limit_s - other.limit_s) <= LIKE * self.limit_s
            and abs(self.density - other.density) <= LIKE * self.density
        )

    def owe(self, due: float) -> None:
        """So many GPUs."""
        request = self.job.request
        fair_rate = due / self.worth_s
        self.fair_gpus = due
        self.limit_s = request.slowdown_bound / fair_rate
        self.rate = fair_rate * request.load.weight
        self.weight = self.rate * self.figures.batch_tokens
        self.needs = self.figures.least_s / self.limit_s
        self.first_s = 1 / self.rate
        self.strictness = self.first_s / self.limit_s


class Load:
    """What the jobs of a group come to: sums over their batches. Never changed, but for what it
    remembers, and for `renew`. The ones that it gives are up to date if it is."""

    __slots__ = (
        "_less",
        "_more",
        "beside_s",
        "densest",
        "dues",
        "fair_tokens",
        "latent",
        "limit_s",
        "longest",
        "loosest",
        "mistake",
        "needs",
        "parameters",
        "pieces",
        "pressed",
        "prices",
        "refused",
        "sequences",
        "step_s",
        "thinnest",
        "tokens",
        "wholes",
        "worth",
    )

    tokens: float
    beside_s: float
    """As `JobFigures` has it."""

    sequences: float
    step_s: float
    parameters: float
    worth: float
    """GPUs' worth x seconds."""

    fair_tokens: float
    """That the jobs are due in a second."""

    needs: float
    latent: float
    limit_s: float
    """Of the job that may be slowed least."""

    pressed: str
    """That job."""

    longest: int
    densest: float
    """GPUs' worth per token, of the job that has most of it."""

    thinnest: float
    loosest: float
    """The largest `looseness`."""

    def __init__(self, pieces: tuple[Piece, ...]) -> None:
        """`load_of` and `plus` fill it."""
        self.pieces = pieces
        self.dues = pieces[0].dues
        self.prices: dict[int | tuple[int, float], Priced] = {}
        """What was asked already, by the GPUs that it was asked for."""

        self.refused: dict[int | tuple[int, float], int] = {}
        """Where nothing holds, and no price was worked out: the buckets that were asked about."""

        self.wholes: dict[int | tuple[int, float], Whole] = {}
        self.mistake: float | None = None
        """Of predictions; None until somebody asked."""

        self._more: dict[Piece, Load] = {}
        self._less: dict[Piece, Load] = {}

    def plus(self, piece: Piece) -> "Load":
        found = self._more.get(piece)
        if found is None:
            if len(self._more) >= MOST_KEPT:
                self._more.clear()
            found = self._more[piece] = self._plus(piece)
        elif found.dues != self.dues:
            found.renew()
        return found

    def without(self, piece: Piece) -> "Load":
        """Of at least two jobs."""
        found = self._less.get(piece)
        if found is None:
            rest = tuple([each for each in self.pieces if each is not piece])
            assert rest, f"{piece.name} is the only one"
            found = self._less[piece] = load_of(rest)
        elif found.dues != self.dues:
            found.renew()
        return found

    def renew(self) -> None:
        """After dues have changed."""
        fair_tokens, needs, limit_s, pressed = 0.0, 0.0, float("inf"), ""
        for piece in self.pieces:
            fair_tokens += piece.weight
            needs += piece.needs
            if piece.limit_s < limit_s:
                limit_s, pressed = piece.limit_s, piece.name
        self.fair_tokens, self.needs, self.limit_s, self.pressed = (
            fair_tokens,
            needs,
            limit_s,
            pressed,
        )
        self.prices = {}
        self.refused = {}
        self.dues = self.pieces[0].dues

    def exchanged(self, gone: Piece, come: Piece) -> "Load":
        """With one job instead of another."""
        return come.alone if len(self.pieces) == 1 else self.without(gone).plus(come)

    def _plus(self, piece: Piece) -> "Load":
        # As if `load_of` had gone on with one more, to the last digit.
        figures = piece.figures
        _, _, _, sequences, _, step_s, parameters = figures.whole
        found = Load((*self.pieces, piece))
        found.tokens = self.tokens + figures.batch_tokens
        found.beside_s = self.beside_s + figures.beside_s
        found.sequences = self.sequences + sequences
        found.step_s = self.step_s + step_s
        found.parameters = self.parameters + parameters
        found.worth = self.worth + piece.worth_s
        found.fair_tokens = self.fair_tokens + piece.weight
        found.needs = self.needs + piece.needs
        found.latent = self.latent + figures.latent
        presses = piece.limit_s < self.limit_s
        found.limit_s = piece.limit_s if presses else self.limit_s
        found.pressed = piece.name if presses else self.pressed
        longest, density = figures.longest, piece.density
        found.longest = longest if longest > self.longest else self.longest
        found.densest = density if density > self.densest else self.densest
        found.thinnest = density if density < self.thinnest else self.thinnest
        looseness = piece.looseness
        found.loosest = looseness if looseness > self.loosest else self.loosest
        return found


def load_of(pieces: Sequence[Piece]) -> Load:
    """Of at least one job."""
    tokens = beside_s = sequences = step_s = parameters = 0.0
    worth = fair_tokens = needs = latent = densest = loosest = 0.0
    limit_s = thinnest = float("inf")
    pressed, longest = "", 0
    for piece in pieces:
        figures = piece.figures
        _, _, _, mine, _, my_step_s, my_parameters = figures.whole
        tokens += figures.batch_tokens
        beside_s += figures.beside_s
        sequences += mine
        step_s += my_step_s
        parameters += my_parameters
        worth += piece.worth_s
        fair_tokens += piece.weight
        needs += piece.needs
        latent += figures.latent
        if piece.limit_s < limit_s:
            limit_s, pressed = piece.limit_s, piece.name
        if figures.longest > longest:
            longest = figures.longest
        if piece.density > densest:
            densest = piece.density
        if piece.density < thinnest:
            thinnest = piece.density
        if piece.looseness > loosest:
            loosest = piece.looseness
    load = Load(tuple(pieces))
    load.tokens, load.beside_s, load.sequences = tokens, beside_s, sequences
    load.step_s, load.parameters, load.worth = step_s, parameters, worth
    load.fair_tokens, load.needs, load.latent = fair_tokens, needs, latent
    load.limit_s, load.pressed, load.longest = limit_s, pressed, longest
    load.densest, load.thinnest, load.loosest = densest, thinnest, loosest
    return load


def _load_of_one(piece: Piece) -> Load:
    """As `load_of`, for the most frequent case."""
    figures = piece.figures
    load = Load((piece,))
    _, _, _, load.sequences, _, load.step_s, load.parameters = figures.whole
    load.tokens, load.beside_s = figures.batch_tokens, figures.beside_s
    load.worth, load.fair_tokens, load.needs = piece.worth_s, piece.weight, piece.needs
    load.latent, load.limit_s, load.pressed = figures.latent, piece.limit_s, piece.name
    load.longest, load.densest, load.thinnest = figures.longest, piece.density, piece.density
    load.loosest = piece.looseness
    return load


class Pieces:
    """Makes them every turn, and keeps what is as it was."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._kept: dict[str, Piece] = {}
        self._loads: dict[str, KeptLoad] = {}
        self._credit: dict[str, float] = {}
        self._dues = 0
        self._seen: tuple[State, int] | None = None
        """The state that it was last asked about, and its revision."""

    def of(self, state: State) -> dict[str, Piece]:
        """Of all runnable jobs, by name, in order of arrival. Those of the last turn are changed by
        it."""
        self.credit(state)
        last = self._seen
        if last is None or last[0] is not state or last[1] != state.revision:
            self._bring_up_to_date(state)
            self._seen = (state, state.revision)
        return dict(self._kept)

    def credit(self, state: State) -> None:
        """That of the tenants, which every piece looks up, is brought up to date."""
        self._credit.clear()
        self._credit.update({tenant: credit_of(state, tenant) for tenant in state.due})

    def of_outside(self, state: State, jobs: Iterable[JobState]) -> dict[str, Piece]:
        """Of jobs beyond the limit: due what the best served of as many GPUs are."""
        most = max(fair_gpus(state).values())
        result: dict[str, Piece] = {}
        for job in jobs:
            piece = result[job.name] = new_piece(job, self.costs, self._credit)
            piece.owe(min(float(piece.gpus), most))
            piece.dues = self._dues
        return result

    def _bring_up_to_date(self, state: State) -> None:
        fair = fair_gpus(state)
        result: dict[str, Piece] = {}
        kept = self._kept
        changed = False
        for job in state.runnable():
            name = job.request.name
            piece, due = kept.get(name), fair[name]
            if piece is None or piece.job is not job:
                piece = new_piece(job, self.costs, self._credit)
                piece.owe(due)
            elif piece.fair_gpus != due:
                piece.owe(due)
                changed = True
            result[name] = piece
        for name in kept.keys() - result.keys():
            # It and its load know each other, and would be left to the garbage collector.
            kept[name].load = None
        self._dues += changed
        for piece in result.values():
            piece.dues = self._dues
        self._kept = result

    def loads(self, state: State, pieces: Mapping[str, Piece]) -> dict[str, Load]:
        """Of the groups, by their names."""
        kept, self._loads = self._loads, {}
        result: dict[str, Load] = {}
        for name, group in state.groups.items():
            found = kept.get(name)
            if found is None or found.group is not group or found.changes != group.changes:
                load = load_of_group(group, pieces)
                found = KeptLoad(group, group.changes, load)
            elif found.load.dues != self._dues:
                found.load.renew()
            self._loads[name] = found
            result[name] = found.load
        return result


class KeptLoad(NamedTuple):
    group: GroupState
    changes: int
    """Of the group's jobs, when it was worked out."""

    load: Load


def group_loads(state: State, pieces: Mapping[str, Piece]) -> dict[str, Load]:
    return {name: load_of_group(group, pieces) for name, group in state.groups.items()}


def load_of_group(group: GroupState, pieces: Mapping[str, Piece]) -> Load:
    jobs = group.jobs
    if len(jobs) == 1:
        return pieces[next(iter(jobs))].alone
    return load_of([pieces[job] for job in jobs])


def new_piece(job: JobState, costs: Costs, credit: Mapping[str, float]) -> Piece:
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
        worth_s=worth_s,
        density=worth_s / figures.batch_tokens,
        rank=job.number,
        useful=max(1, int(figures.whole.sequences + 1e-9)),
        share=(
            figures.beside_s,
            figures.whole.sequences,
            figures.whole.step_s,
            figures.whole.parameters,
            worth_s,
        ),
        looseness=request.slowdown_bound * request.load.weight,
        fresh_s=min(
            FRESH_S, costs.start_s(request.base) + request.total_steps * figures.solo_step_s
        ),
        credit=credit,
    )


def pieces_of(state: State, costs: Costs) -> dict[str, Piece]:
    """Once."""
    return Pieces(costs).of(state)


def credit_of(state: State, tenant: str) -> float:
    """Above 1 for a tenant that was due more GPU-seconds than its jobs have held."""
    due = state.due.get(tenant, 0.0) + FRESH_S
    served = state.served.get(tenant, 0.0) + FRESH_S
    return min(CREDIT_LIMIT, max(1 / CREDIT_LIMIT, due / served))
