"""What some jobs on some GPUs come to, under the best bucket."""

from collections.abc import Sequence
from dataclasses import dataclass

from tlora.core.cluster import Link
from tlora.costs.groups import NO_WORK, BaseCosts, Costs, RoundWork, fullest_part, shared_tokens
from tlora.schedule.pieces import Piece

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Priced:
    bucket: int
    worth: float
    breach: float
    """The largest slowdown / bound among the jobs: at most 1 where all bounds hold."""

    pressed: str
    """The job that has it."""

    memory_bytes: float
    fits: bool

    @property
    def holds(self) -> bool:
        return self.fits and self.breach <= 1 + ROUNDING

    @property
    def bound_by(self) -> str:
        """What forbids it, or would forbid more."""
        return f"slowdown of {self.pressed}" if self.fits else "memory"


class Load:
    """Sums over the jobs of a group; adding one is cheap."""

    __slots__ = ("latent", "limit_s", "longest", "parameters", "pieces", "pressed", "work", "worth")

    def __init__(
        self,
        pieces: tuple[Piece, ...] = (),
        work: RoundWork = NO_WORK,
        worth: float = 0.0,
        limit_s: float = float("inf"),
        pressed: str = "",
        longest: int = 0,
        parameters: float = 0.0,
        latent: float = 0.0,
    ) -> None:
        self.pieces = pieces
        self.work = work
        self.worth = worth
        self.limit_s = limit_s
        self.pressed = pressed
        self.longest = longest
        self.parameters = parameters
        self.latent = latent

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
        )

    def without(self, *pieces: Piece) -> "Load":
        gone = {piece.name for piece in pieces}
        return load_of([piece for piece in self.pieces if piece.name not in gone])


def load_of(pieces: Sequence[Piece]) -> Load:
    load = Load()
    for piece in pieces:
        load = load.plus(piece)
    return load


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
        best = self._whole(base, load, replicas, link, pace)
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
    ) -> Priced | None:
        """Every job's whole batch in each round, so that all step together; None if no bucket holds
        that."""
        work = load.work
        part = fullest_part(work.sequences, replicas)
        bucket = base.bucket_for(work.tokens * part)
        if bucket is None:
            return None
        self.asked += 1
        segments = float(len(load.pieces))
        if replicas > 1:
            segments = sum(min(1.0, each.figures.whole.sequences * part) for each in load.pieces)
        seconds, rows = base.round_s(work, segments, bucket, replicas, link)
        seconds *= pace
        memory = base.memory_bytes(
            rows=rows, longest=load.longest, bucket=bucket, parameters=load.parameters
        )
        return Priced(
            bucket,
            load.worth / seconds,
            seconds / load.limit_s,
            load.pressed,
            memory,
            base.fits(memory),
        )

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
        return Priced(bucket, worth / seconds, breach, pressed, memory, base.fits(memory))


def _better(one: Priced, other: Priced) -> bool:
    if one.holds != other.holds:
        return one.holds
    if one.holds:
        return one.worth > other.worth
    if one.fits != other.fits:
        return one.fits
    return one.breach < other.breach
