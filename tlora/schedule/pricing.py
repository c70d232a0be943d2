"""What some jobs on some GPUs come to, under the best bucket."""

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter

from tlora.core.cluster import Link
from tlora.costs.groups import Costs, Span
from tlora.costs.rounds import BaseCosts, fullest_part
from tlora.schedule.pieces import Load, Piece, Priced, Whole

ROUNDING = 1e-9

HOPELESS = 1 + 1e-6
"""By so much must needs be more than there is: sums are rounded."""

CANCELLED = 1e-6
"""What is left of a sum after so much was taken away is rounding: it is summed anew."""

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
        """On these GPUs, of which the slowest sets the pace: with the bucket that is worth most
        while all bounds hold; where none holds them, the one that breaks them least."""
        span = self.costs.span(gpus)
        speed, key = 1.0, span.key
        if self.speeds:
            speed, key = self._slowest(gpus, key)
        found = load.prices.get(key)
        if found is None:
            found = self._price(load, span, speed, key)
            assert found is not None
            load.prices[key] = found
        self.asked += found.asked
        return found

    def holding(self, load: Load, gpus: tuple[int, ...]) -> Priced | None:
        """The same if memory and all bounds hold. It counts what `on` would, and works out less
        where they cannot."""
        span = self.costs.span(gpus)
        speed, key = 1.0, span.key
        if self.speeds:
            speed, key = self._slowest(gpus, key)
        found = load.prices.get(key)
        if found is None:
            asked = load.refused.get(key)
            if asked is None:
                found = self._price(load, span, speed, key, only_holding=True)
                if found is not None:
                    load.prices[key] = found
                    self.asked += found.asked
                    return found
                asked = load.refused[key]
            self.asked += asked
            return None
        self.asked += found.asked
        return found if found.holds else None

    def _slowest(self, gpus: tuple[int, ...], key: int) -> tuple[float, int | tuple[int, float]]:
        speed = min([self.speeds.get(gpu, 1.0) for gpu in gpus])
        return speed, key if speed == 1.0 else (key, speed)

    def is_hopeless(self, load: Load, replicas: int, piece: Piece | None = None) -> bool:
        """No bucket can hold all bounds, known without a price: the seconds of a GPU that the jobs
        take at least are more than there are. `piece` is one more job."""
        needs, latent, jobs = load.needs, load.latent, len(load.pieces)
        if piece is not None:
            needs, latent, jobs = needs + piece.needs, latent + piece.figures.latent, jobs + 1
        return needs * self.costs.mistake(latent, jobs) > replicas * HOPELESS

    def are_hopeless(self, loads: Sequence[Load], replicas: int) -> bool:
        """Likewise of several loads together."""
        needs, latent, jobs = 0.0, 0.0, 0
        for load in loads:
            needs, latent, jobs = needs + load.needs, latent + load.latent, jobs + len(load.pieces)
        return needs * self.costs.mistake(latent, jobs) > replicas * HOPELESS

    def does_hold(self, load: Load, gpus: tuple[int, ...]) -> bool:
        """As its price says, which most often need not be worked out for that, nor counted."""
        if not self.speeds:
            whole = load.wholes.get(self.costs.span(gpus).key)
            # Another bucket would be taken only if it held as well.
            if (
                whole is not None
                and whole.bucket is not None
                and whole.fits
                and whole.seconds / load.limit_s <= 1 + ROUNDING
            ):
                return True
        return self.on(load, gpus).holds

    def most_without(self, load: Load, piece: Piece, replicas: int) -> float:
        """The worth of what the job leaves behind is no more than this, on GPUs at full speed: all
        tokens as dense as the densest, and none but the backbone's seconds."""
        figures, left = piece.figures, len(load.pieces) - 1
        tokens = load.tokens - figures.batch_tokens
        base = self.costs.base(piece.base)
        seconds = base.fastest_s(tokens / replicas, left if replicas == 1 else 1)
        seconds *= self.costs.mistake(load.latent - figures.latent, left)
        return load.densest * tokens / seconds * HOPELESS

    def _price(
        self,
        load: Load,
        span: Span,
        speed: float,
        key: int | tuple[int, float],
        *,
        only_holding: bool = False,
    ) -> Priced | None:
        """None only where nothing holds and `only_holding`: the load knows then what was asked."""
        replicas = span.replicas
        if only_holding and load.needs * self._mistake(load) > replicas * HOPELESS:
            load.refused[key] = self._all_asked(load, replicas)
            return None
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
        pace = self._mistake(load) / speed
        link = span.link
        asked = 0 if best is None else 1
        for bucket in reversed(base.buckets):
            tokens = bucket * replicas
            if tokens >= load.tokens:
                continue
            asked += 1
            # What the backbone costs, whoever is in it.
            least_s = base.least_s[bucket]
            if replicas == 1:
                least_s += base.time.segment_s * (len(load.pieces) - 1)
            least_s *= pace
            if best is not None and best.holds:
                # Smaller ones are better only where padding or a bound made the larger ones bad.
                # They cannot be worth more than if all tokens were of the densest job.
                most = load.densest * tokens / least_s
                if most * (1 + ROUNDING) <= best.worth:
                    break
                found = self._shared(base, load, bucket, replicas, link, pace)
                if not _better(found, best):
                    break
                best = found
            elif only_holding and load.fair_tokens * least_s > tokens * load.loosest * HOPELESS:
                # The tokens that would keep everybody within bounds do not go through.
                continue
            else:
                found = self._shared(base, load, bucket, replicas, link, pace)
                if best is None or _better(found, best):
                    best = found
        if only_holding and (best is None or not best.holds):
            load.refused[key] = asked
            return None
        assert best is not None
        best.asked = asked
        return best

    def _mistake(self, load: Load) -> float:
        found = load.mistake
        if found is None:
            found = load.mistake = self.costs.mistake(load.latent, len(load.pieces))
        return found

    def _all_asked(self, load: Load, replicas: int) -> int:
        """Buckets that are looked at where none holds."""
        base = self.costs.base(load.pieces[0].base)
        part = fullest_part(load.sequences, replicas)
        asked = 0 if _bucket_of_all(base, load, replicas, part) is None else 1
        for bucket in base.buckets:
            if bucket * replicas >= load.tokens:
                break
            asked += 1
        return asked

    def _whole(self, load: Load, span: Span, speed: float) -> Whole:
        base = self.costs.base(load.pieces[0].base)
        replicas = span.replicas
        part = fullest_part(load.sequences, replicas)
        bucket = _bucket_of_all(base, load, replicas, part)
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
        seconds *= self._mistake(load) / speed
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
        if len(load.pieces) == 1:
            return self._shared_by_one(base, load, bucket, replicas, link, pace)
        # Tokens are dealt by weight, which is what a job is due in a second. What those whose batch
        # is through by that leave goes to the others, so that all of these get what they are due
        # in some seconds.
        left, heavy = float(bucket * replicas), load.fair_tokens
        order = sorted(load.pieces, key=_first_s)
        through = 0
        lost = CANCELLED * heavy
        # The last one has never enough.
        for piece in order[:-1]:
            if heavy < lost:
                heavy = sum([each.weight for each in order[through:]])
            if piece.first_s * heavy >= left:
                break
            left -= piece.figures.batch_tokens
            heavy -= piece.weight
            through += 1
        if heavy < lost:
            heavy = sum([each.weight for each in order[through:]])
        time_s = left / heavy
        beside_s = sequences = steps = step_s = parameters = worth = breach = 0.0
        pressed = ""
        for piece in order[:through]:
            mine = piece.share
            beside_s += mine[0]
            sequences += mine[1]
            steps += 1.0
            step_s += mine[2]
            parameters += mine[3]
            worth += mine[4]
            slow = 1 / piece.limit_s
            if slow > breach:
                breach, pressed = slow, piece.name
        for piece in order[through:]:
            mine = piece.share
            part = piece.rate * time_s
            beside_s += mine[0] * part
            sequences += mine[1] * part
            steps += part
            step_s += mine[2] * part
            parameters += mine[3] * part
            worth += mine[4] * part
            # Nothing may be left for those who are due next to nothing.
            slow = piece.strictness / time_s if time_s > 0 else math.inf
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

    def _shared_by_one(
        self,
        base: BaseCosts,
        load: Load,
        bucket: int,
        replicas: int,
        link: Link | None,
        pace: float,
    ) -> Priced:
        """The same of a job by itself, to the last digit."""
        piece = load.pieces[0]
        time_s = float(bucket * replicas) / load.fair_tokens
        figures = piece.figures
        _, _, _, sequences, _, step_s, parameters = figures.whole
        steps = piece.rate * time_s
        sequences *= steps
        part = segments = 1.0
        if replicas > 1:
            part = fullest_part(sequences, replicas)
            segments = min(1.0, sequences * part)
        seconds, rows = base.seconds(
            bucket * replicas * part,
            figures.beside_s * steps * part,
            segments,
            bucket,
            steps,
            step_s * steps,
            parameters * steps,
            replicas,
            link,
        )
        seconds *= pace
        breach = piece.strictness / time_s * seconds
        memory, fits = base.memory(rows, load.longest, bucket, load.parameters)
        holds = fits and breach <= 1 + ROUNDING
        worth = piece.worth_s * steps / seconds
        return Priced(bucket, worth, breach, piece.name, memory, fits, holds)


def _bucket_of_all(base: BaseCosts, load: Load, replicas: int, part: float) -> int | None:
    """For every job's whole batch in a round. Where the largest holds them but for what sequences
    that are whole add to the fullest replica, that one goes on into a second nano-batch."""
    found, largest = base.bucket_for(load.tokens * part), base.buckets[-1]
    return largest if found is None and load.tokens <= largest * replicas else found


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
