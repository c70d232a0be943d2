"""One base on one kind of GPU: the seconds and the bytes of a round.

A round is a nano-batch on every replica and the steps that follow. What goes into it is a sum over
jobs (`RoundWork`); what comes of it is a few products (`BaseCosts`). Who is in a round, and under
which plan, is for groups.py to say.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil
from typing import Literal, NamedTuple

from tlora.core.cluster import Cluster, Link
from tlora.costs.memory import BYTES_PER_ADAPTER_PARAMETER
from tlora.costs.predict import rows_of
from tlora.costs.profile import Profile

Kernel = Literal["fused", "unfused"]

MEMORY_MARGIN = 0.05
"""Of the device, kept free: the memory model is a fit."""

UNFUSED_ROWS = 0.51 * 8192 / 8
"""What one more adapter costs in a loop over adapters, in rows of the saturated backbone: eight of
them added 51 % to the frozen linears of 8,192 rows (H200, 8B, rank 16, eager)."""

BUCKET_HALVINGS = 4
"""Plans may have the profile's budget of tokens, or that halved so many times."""


class RoundWork(NamedTuple):
    """What a round holds, summed over its jobs. Of whole batches it is a sum of what each job has
    (`JobFigures.whole`), so groups are merged by adding."""

    tokens: float
    squares: float
    lora_s: float
    sequences: float
    steps: float
    step_s: float
    parameters: float
    """Of the jobs that step, each as often as it does."""

    def plus(self, other: "RoundWork") -> "RoundWork":
        return RoundWork(
            self.tokens + other.tokens,
            self.squares + other.squares,
            self.lora_s + other.lora_s,
            self.sequences + other.sequences,
            self.steps + other.steps,
            self.step_s + other.step_s,
            self.parameters + other.parameters,
        )

    def times(self, part: float) -> "RoundWork":
        return RoundWork(*(each * part for each in self))


NO_WORK = RoundWork(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class BaseCosts:
    """A profile's figures, as a round needs them."""

    def __init__(self, profile: Profile, usable_bytes: float | None) -> None:
        self.profile = profile
        self.time = profile.time
        self.pass_s = profile.steps.pass_s
        self.buckets = sorted(
            {max(1, profile.budget_tokens >> halving) for halving in range(BUCKET_HALVINGS + 1)}
        )
        """The budgets that plans may have."""

        self._rows = {bucket: profile.sizes(bucket) for bucket in self.buckets}
        time = profile.time
        self._time = (time.fixed_s, time.segment_s, time.flat_s, time.row_s, time.sharpness)
        self.least_s = {
            bucket: self.seconds(float(bucket), 0.0, 1.0, bucket, 0.0, 0.0, 0.0, 1, None)[0]
            for bucket in self.buckets
        }
        """Of a full nano-batch, whatever is in it."""

        self.usable_bytes = usable_bytes
        """Of a GPU, with the margin; None where nobody says."""

        at_nothing = profile.memory.bytes(rows=0.0, adapter_parameters=0.0)
        self._knows_memory = at_nothing is not None
        self._constant_bytes = at_nothing or 0.0
        self._row_bytes = profile.memory.row_bytes or 0.0

    def rows(self, tokens: float, bucket: int) -> float:
        """With the padding up to a size of this budget; as `rows_of`, but faster."""
        sizes = self._rows.get(bucket)
        # The shares' sum is off by rounding.
        tokens *= 1 - 1e-9
        if sizes is None or tokens > bucket:
            return rows_of(self.profile, tokens, bucket)
        place = bisect_left(sizes, tokens)
        return sizes[place] if place < len(sizes) else float(bucket)

    def bucket_for(self, tokens: float) -> int | None:
        """The smallest that holds so many tokens."""
        place = bisect_left(self.buckets, tokens * (1 - 1e-9))
        return self.buckets[place] if place < len(self.buckets) else None

    def round_s(
        self,
        work: RoundWork,
        segments: float,
        bucket: int,
        replicas: int,
        link: Link | None,
    ) -> tuple[float, float]:
        """Seconds of a round, and the rows of its fullest replica. `segments` are those in the
        fullest replica."""
        part = fullest_part(work.sequences, replicas)
        beside_s = (self.time.square_s * work.squares + work.lora_s) * part
        return self.seconds(
            work.tokens * part,
            beside_s,
            segments,
            bucket,
            work.steps,
            work.step_s,
            work.parameters,
            replicas,
            link,
        )

    def seconds(
        self,
        tokens: float,
        beside_s: float,
        segments: float,
        bucket: int,
        steps: float,
        step_s: float,
        parameters: float,
        replicas: int,
        link: Link | None,
    ) -> tuple[float, float]:
        """The same from what its fullest replica has; `steps` and what follows are of all. In one
        piece, because policies ask for little else."""
        rows = self.rows(tokens, bucket)
        fixed_s, segment_s, flat_s, row_s, sharpness = self._time
        large, small = flat_s, row_s * rows + beside_s
        if small > large:
            large, small = small, large
        if small > 0:
            large *= (1 + (small / large) ** sharpness) ** (1 / sharpness)
        passes = steps if steps < 1 else 1.0
        seconds = fixed_s + segment_s * segments + large + passes * self.pass_s + step_s
        if replicas > 1 and link is not None:
            ring = 2 * (replicas - 1) / replicas
            seconds += passes * link.latency_s + ring * 4 * parameters / link.bytes_per_s
        return seconds, rows

    def fastest_s(self, tokens: float, segments: float) -> float:
        """Seconds that a round with so many tokens on a replica takes at least."""
        fixed_s, segment_s, flat_s, row_s, _ = self._time
        rows_s = row_s * tokens
        return fixed_s + segment_s * segments + (rows_s if rows_s > flat_s else flat_s)

    def memory(
        self, rows: float, longest: int, bucket: int, parameters: float
    ) -> tuple[float, bool]:
        """Bytes at the peak, on the fullest GPU, and whether they fit; 0 where it is not known."""
        if not self._knows_memory:
            return 0.0, True
        if longest > rows:
            rows = self.rows(float(longest), bucket)
        found = self._constant_bytes + self._row_bytes * rows
        found += BYTES_PER_ADAPTER_PARAMETER * parameters
        return found, self.usable_bytes is None or found <= self.usable_bytes


def fullest_part(sequences: float, replicas: int) -> float:
    """Of so many sequences, the part that the fullest replica takes: sequences are whole."""
    if replicas == 1:
        return 1.0
    return ceil(sequences / replicas - 1e-9) / sequences


def shared_tokens(
    batch_tokens: Sequence[float], weights: Sequence[float], capacity: float
) -> list[float]:
    """Of each job in a round: by weight, at most its batch; what one cannot use goes to the
    others."""
    if sum(batch_tokens) <= capacity:
        return list(batch_tokens)
    shares = [0.0] * len(batch_tokens)
    # Those whose batch is small for their weight run out first.
    order = sorted(range(len(batch_tokens)), key=lambda i: batch_tokens[i] / weights[i])
    # Summed from the last on: a sum of which a large part is taken away is rounding.
    heavy = list(accumulate(weights[i] for i in reversed(order)))
    left = capacity
    for place, i in enumerate(order):
        total = heavy[-1 - place]
        if left * (weights[i] / total) <= batch_tokens[i]:
            # Nor have those behind it enough. All get theirs at one level: what a heavy one leaves
            # of the rest may be nothing but rounding.
            for other in order[place:]:
                shares[other] = min(batch_tokens[other], left / total * weights[other])
            break
        shares[i] = batch_tokens[i]
        left -= batch_tokens[i]
    return shares


def with_kernel(profile: Profile, kernel: Kernel) -> Profile:
    if kernel == "fused":
        return profile
    loop_s = UNFUSED_ROWS * profile.time.row_s
    return replace(profile, time=replace(profile.time, segment_s=profile.time.segment_s + loop_s))


def usable_bytes(profile: Profile, cluster: Cluster, margin: float) -> float | None:
    found = [profile.memory.usable_bytes, cluster.memory_bytes(range(len(cluster)))]
    known = [each for each in found if each is not None]
    return min(known) * (1 - margin) if known else None
