"""What some jobs on some GPUs come to, under the best bucket."""

from collections.abc import Sequence
from dataclasses import dataclass

from tlora.core.cluster import Link
from tlora.costs.groups import BaseCosts, Costs, RoundWork, fullest_part, shared_tokens
from tlora.schedule.pieces import Piece

ROUNDING = 1e-9


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

    @property
    def bound_by(self) -> str:
        """What forbids it, or would forbid more."""
        return f"slowdown of {self.pressed}" if self.fits else "memory"


class Load:
    """Sums over the jobs of a group; adding one is cheap."""

    __slots__ = (
        "densest",
        "latent",
        "limit_s",
        "longest",
        "parameters",
        "pieces",
        "pressed",
        "thinnest",
        "work",
        "worth",
    )

    def __init__(
        self,
        pieces: tuple[Piece, ...],
        work: RoundWork,
        worth: float,
        limit_s: float,
        pressed: str,
        longest: int,
        parameters: float,
        latent: float,
        densest: float,
        thinnest: float,
    ) -> None:
        self.pieces = pieces
        self.work = work
        self.worth = worth
        self.limit_s = limit_s
        self.pressed = pressed
        self.longest = longest
        self.parameters = parameters
        self.latent = latent
        self.densest = densest
        """GPUs' worth per token, of the job that has most of it."""

        self.thinnest = thinnest

    def plus(self, piece: Piece) -> "Load":
        figures = piece.figures
        presses = piece.limit_s < self.limit_s
        return Load(
            (*self.pieces, piece),
            self.work.plus(figures.whole),
            self.worth + piece.worth_s,
            piece.limit_s if presses else self.limit_s,
            piece.name if presses else self.pressed,
            max(self.longest, figures.longest),
            self.parameters + figures.parameters,
            self.latent + figures.latent,
            max(self.densest, piece.density),
            min(self.thinnest, piece.density),
        )

    def merged(self, other: "Load") -> "Load":
        presses = other.limit_s < self.limit_s
        return Load(
            (*self.pieces, *other.pieces),
            self.work.plus(other.work),
            self.worth + other.worth,
            other.limit_s if presses else self.limit_s,
            other.pressed if presses else self.pressed,
            max(self.longest, other.longest),
            self.parameters + other.parameters,
            self.latent + other.latent,
            max(self.densest, other.densest),
            min(self.thinnest, other.thinnest),
        )

    def without(self, *pieces: Piece) -> "Load":
        gone = {piece.name for piece in pieces}
        return load_of([piece for piece in self.pieces if piece.name not in gone])


def load_of(pieces: Sequence[Piece]) -> Load:
    """Of at least one job."""
    tokens = squares = lora_s = sequences = steps = step_s = stepped = 0.0
    worth = parameters = latent = densest = 0.0
    limit_s = thinnest = float("inf")
    pressed, longest = "", 0
    for piece in pieces:
        figures = piece.figures
        whole = figures.whole
        tokens += whole[0]
        squares += whole[1]
        lora_s += whole[2]
        sequences += whole[3]
        steps += whole[4]
        step_s += whole[5]
        stepped += whole[6]
        worth += piece.worth_s
        parameters += figures.parameters
        latent += figures.latent
        if piece.limit_s < limit_s:
            limit_s, pressed = piece.limit_s, piece.name
        if figures.longest > longest:
            longest = figures.longest
        if piece.density > densest:
            densest = piece.density
        if piece.density < thinnest:
            thinnest = piece.density
    return Load(
        tuple(pieces),
        RoundWork(tokens, squares, lora_s, sequences, steps, step_s, stepped),
        worth,
        limit_s,
        pressed,
        longest,
        parameters,
        latent,
        densest,
        thinnest,
    )


PADDING = 1.1
"""Rows for each token, on all replicas as on the fullest: above it smaller buckets are looked at
too."""

MIXED = 1.5
"""And where jobs differ by more than this in GPUs' worth per token."""


class Pricing:
    """Counts what it is asked, for the laws on how work grows."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.asked = 0

    def price(self, load: Load, replicas: int, link: Link | None, speed: float = 1.0) -> Priced:
        """The bucket that is worth most while all bounds hold; where none holds them, the one that
        breaks them least."""
        base = self.costs.base(load.pieces[0].base)
        pace = self.costs.mistake(load.latent, len(load.pieces)) / speed
        best, padding = self._whole(base, load, replicas, link, pace)
        if (
            best is not None
            and best.holds
            and padding <= PADDING
            and load.densest <= MIXED * load.thinnest
        ):
            return best
        for bucket in reversed(base.buckets):
            if bucket * replicas >= load.work.tokens:
                continue
            found = self._shared(base, load, bucket, replicas, link, pace)
            if best is None or _better(found, best):
                best = found
            elif best.holds:
                # Smaller ones are better only where padding or a bound made the larger ones bad.
                break
        assert best is not None
        return best

    def _whole(
        self, base: BaseCosts, load: Load, replicas: int, link: Link | None, pace: float
    ) -> tuple[Priced | None, float]:
        """Every job's whole batch in each round, so that all step together, and the rows for each
        token; None if no bucket holds that."""
        work = load.work
        part = fullest_part(work.sequences, replicas)
        bucket = base.bucket_for(work.tokens * part)
        if bucket is None:
            return None, 1.0
        self.asked += 1
        segments = float(len(load.pieces))
        if replicas > 1:
            segments = sum(min(1.0, each.figures.whole.sequences * part) for each in load.pieces)
        seconds, rows = base.round_s(work, segments, bucket, replicas, link)
        seconds *= pace
        memory = base.memory_bytes(
            rows=rows, longest=load.longest, bucket=bucket, parameters=load.parameters
        )
        fits = base.fits(memory)
        breach = seconds / load.limit_s
        holds = fits and breach <= 1 + ROUNDING
        found = Priced(bucket, load.worth / seconds, breach, load.pressed, memory, fits, holds)
        return found, rows * replicas / work.tokens

    def _shared(
        self,
        base: BaseCosts,
        load: Load,
        bucket: int,
        replicas: int,
        link: Link | None,
        pace: float,
    ) -> Priced:
        """Nano-batches that are full before every batch is in."""
        self.asked += 1
        figures = [piece.figures for piece in load.pieces]
        shares = shared_tokens(
            [each.batch_tokens for each in figures],
            [piece.weight for piece in load.pieces],
            bucket * replicas,
        )
        tokens = squares = lora_s = sequences = steps = step_s = parameters = worth = 0.0
        for share, piece in zip(shares, load.pieces, strict=True):
            whole = piece.figures.whole
            part = share / whole.tokens
            tokens += share
            squares += whole.squares * part
            lora_s += whole.lora_s * part
            sequences += whole.sequences * part
            steps += part
            step_s += whole.step_s * part
            parameters += whole.parameters * part
            worth += piece.worth_s * part
        work = RoundWork(tokens, squares, lora_s, sequences, steps, step_s, parameters)
        segments = float(len(figures))
        if replicas > 1:
            part = fullest_part(sequences, replicas)
            segments = sum(
                min(1.0, share / each.mean_length * part)
                for share, each in zip(shares, figures, strict=True)
            )
        seconds, rows = base.round_s(work, segments, bucket, replicas, link)
        seconds *= pace
        breach, pressed = max(
            (seconds * piece.figures.batch_tokens / share / piece.limit_s, piece.name)
            for share, piece in zip(shares, load.pieces, strict=True)
        )
        memory = base.memory_bytes(
            rows=rows, longest=load.longest, bucket=bucket, parameters=load.parameters
        )
        fits = base.fits(memory)
        holds = fits and breach <= 1 + ROUNDING
        return Priced(bucket, worth / seconds, breach, pressed, memory, fits, holds)


def _better(one: Priced, other: Priced) -> bool:
    if one.holds != other.holds:
        return one.holds
    if one.holds:
        return one.worth > other.worth
    if one.fits != other.fits:
        return one.fits
    return one.breach < other.breach


def no_worse(after: Priced, before: Priced) -> bool:
    """It fits, and bounds hold, or are broken by no more than before."""
    return after.fits and after.breach <= max(1.0, before.breach) * (1 + ROUNDING)
