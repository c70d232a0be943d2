"""What some jobs on some GPUs come to, under the best bucket."""

from collections.abc import Mapping, Sequence
from operator import attrgetter

from tlora.core.cluster import Link
from tlora.costs.groups import Costs, Span
from tlora.costs.rounds import BaseCosts, fullest_part
from tlora.schedule.pieces import Load, Piece, Priced, Whole

ROUNDING = 1e-9

_first_s = attrgetter("first_s")

PADDING = 1.1
"""Rows for each token, on all replicas as on the fullest: above it smaller buckets are looked at
too."""

MIXED = 1.5
"""And where jobs differ by more than this in GPUs' worth per token."""


class Pricing:
    """Counts what it is asked, for the budgets of a turn: also what is known already, so that
    decisions do not depend on what was kept."""

    def __init__(self, costs: Costs, speeds: Mapping[int, float] | None = None) -> None:
        """`speeds`: of the GPUs that have been seen to run slowly."""
        self.costs = costs
        self.speeds = speeds or {}
        self.asked = 0

    def on(self, load: Load, gpus: tuple[int, ...]) -> Priced:
        """On these GPUs; the slowest sets the pace."""
        speeds = self.speeds
        speed = min([speeds.get(gpu, 1.0) for gpu in gpus]) if speeds else 1.0
        span = self.costs.span(gpus)
        key = span.key if speed == 1.0 else (span.key, speed)
        found = load.prices.get(key)
        if found is None:
            return self.price(load, span, speed)
        self.asked += found.asked
        return found

    def price(self, load: Load, span: Span, speed: float = 1.0) -> Priced:
        """The bucket that is worth most while all bounds hold; where none holds them, the one that
        breaks them least."""
        key = span.key if speed == 1.0 else (span.key, speed)
        found = load.prices.get(key)
        if found is None:
            found = load.prices[key] = self._price(load, span, speed, key)
        self.asked += found.asked
        return found

    def is_hopeless(self, load: Load, replicas: int, piece: Piece | None = None) -> bool:
        """No bucket can hold all bounds, known without a price: the seconds of a GPU that the jobs
        take at least are more than there are. `piece` is one more job."""
        needs, latent, jobs = load.needs, load.latent, len(load.pieces)
        if piece is not None:
            needs, latent, jobs = needs + piece.needs, latent + piece.figures.latent, jobs + 1
        return needs * self.costs.mistake(latent, jobs) > replicas * (1 + 1e-6)

    def are_hopeless(self, loads: Sequence[Load], replicas: int) -> bool:
        """Likewise of several loads together."""
        needs, latent, jobs = 0.0, 0.0, 0
        for load in loads:
            needs, latent, jobs = needs + load.needs, latent + load.latent, jobs + len(load.pieces)
        return needs * self.costs.mistake(latent, jobs) > replicas * (1 + 1e-6)

    def _price(self, load: Load, span: Span, speed: float, key: int | tuple[int, float]) -> Priced:
        whole = load.wholes.get(key)
        if whole is None:
            whole = load.wholes[key] = self._whole(load, span, speed)
        best: Priced | None = None
        if whole.bucket is not None:
            fits, breach = whole.fits, whole.seconds / load.limit_s
            best = Priced(
                whole.bucket,
                whole.worth,
                breach,
                load.pressed,
                whole.memory_bytes,
                fits,
                fits and breach <= 1 + ROUNDING,
            )
            if best.holds and whole.padding <= PADDING and load.densest <= MIXED * load.thinnest:
                return best
        base = self.costs.base(load.pieces[0].base)
        pace = self.costs.mistake(load.latent, len(load.pieces)) / speed
        replicas, link = span.replicas, span.link
        asked = 0 if best is None else 1
        for bucket in reversed(base.buckets):
            if bucket * replicas >= load.tokens:
                continue
            asked += 1
            if best is not None and best.holds:
                # Smaller ones are better only where padding or a bound made the larger ones bad.
                # They cannot be worth more than if all tokens were of the densest job, and cost
                # what the backbone costs.
                least_s = base.least_s[bucket]
                if replicas == 1:
                    least_s += base.time.segment_s * (len(load.pieces) - 1)
                most = load.densest * bucket * replicas / (least_s * pace)
                if most * (1 + ROUNDING) <= best.worth:
                    break
                found = self._shared(base, load, bucket, replicas, link, pace)
                if not _better(found, best):
                    break
                best = found
            else:
                found = self._shared(base, load, bucket, replicas, link, pace)
                if best is None or _better(found, best):
                    best = found
        assert best is not None
        best.asked = asked
        return best

    def _whole(self, load: Load, span: Span, speed: float) -> Whole:
        base = self.costs.base(load.pieces[0].base)
        replicas = span.replicas
        part = fullest_part(load.sequences, replicas)
        bucket = base.bucket_for(load.tokens * part)
        if bucket is None:
            return Whole(None)
        segments = float(len(load.pieces))
        if replicas > 1:
            segments = 0.0
            for piece in load.pieces:
                segments += min(1.0, piece.figures.whole.sequences * part)
        seconds, rows = base.seconds(
            load.tokens * part,
            load.beside_s * part,
            segments,
            bucket,
            1.0,
            load.step_s,
            load.parameters,
            replicas,
            span.link,
        )
        seconds *= self.costs.mistake(load.latent, len(load.pieces)) / speed
        memory, fits = base.memory(rows, load.longest, bucket, load.parameters)
        padding = rows * replicas / load.tokens
        return Whole(bucket, seconds, load.worth / seconds, padding, memory, fits)

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
        # Tokens are dealt by weight, which is what a job is due in a second. What those whose batch
        # is through by that leave goes to the others, so that all of these get what they are due
        # in some seconds.
        left, heavy = float(bucket * replicas), load.fair_tokens
        order = sorted(load.pieces, key=_first_s)
        through = 0
        # The last one has never enough.
        for piece in order[:-1]:
            if piece.first_s * heavy > left:
                break
            left -= piece.figures.batch_tokens
            heavy -= piece.weight
            through += 1
        time_s = left / heavy
        beside_s = sequences = steps = step_s = parameters = worth = breach = 0.0
        pressed = ""
        for place, piece in enumerate(order):
            figures = piece.figures
            whole = figures.whole
            part, slow = 1.0, 1 / piece.limit_s
            if place >= through:
                part, slow = piece.rate * time_s, piece.strictness / time_s
            beside_s += figures.beside_s * part
            sequences += whole[3] * part
            steps += part
            step_s += whole[5] * part
            parameters += whole[6] * part
            worth += piece.worth_s * part
            if slow > breach:
                breach, pressed = slow, piece.name
        part, segments = 1.0, float(len(order))
        if replicas > 1:
            part, segments = fullest_part(sequences, replicas), 0.0
            for place, piece in enumerate(order):
                mine = 1.0 if place < through else piece.rate * time_s
                segments += min(1.0, piece.figures.whole[3] * mine * part)
        seconds, rows = base.seconds(
            bucket * replicas * part,
            beside_s * part,
            segments,
            bucket,
            steps,
            step_s,
            parameters,
            replicas,
            link,
        )
        seconds *= pace
        breach *= seconds
        memory, fits = base.memory(rows, load.longest, bucket, load.parameters)
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
