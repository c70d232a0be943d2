"""Nano-batches that a real run ran, and what they should have cost: tells wrong prices from other
decisions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tlora.core.load import JobLoad
from tlora.costs.model import NanoBatch, Segment
from tlora.costs.predict import adapter_parameters
from tlora.costs.profile import Profile
from tlora.runtime.executors.messages import Message, Noted, Said, Stepped


@dataclass(slots=True)
class RunBatch:
    seconds: float
    """From the end of the one before it to its own, with the steps after it."""

    rows: int
    tokens: dict[str, int]
    steps: list[str] = field(default_factory=list[str])
    """Jobs."""


class NanoBatches:
    """Hears all that workers say; keeps those nano-batches before which nothing else happened."""

    def __init__(self) -> None:
        self.kept: list[RunBatch] = []
        self._ended: dict[int, float] = {}
        """Device -> when its last one was through; nothing where something came after it."""

        self._last: dict[int, RunBatch] = {}

    def __call__(self, device: int, message: Message) -> None:
        match message:
            case Noted(what="nano_batch", time=time, fields=fields):
                self._last.pop(device, None)
                if device in self._ended and fields["purpose"] == "train":
                    seconds = time - self._ended[device]
                    batch = RunBatch(seconds, fields["rows"], dict(fields["tokens"]))
                    self.kept.append(batch)
                    self._last[device] = batch
                self._ended[device] = time
            case Stepped(job=job):
                if device in self._last:
                    self._last[device].steps.append(job)
            case Said():
                pass
            case _:
                self._ended.pop(device, None)


def price_error_pct(
    batches: Sequence[RunBatch], loads: Mapping[str, JobLoad], profile: Profile
) -> float:
    """Of their sum."""
    predicted = sum(predicted_s(batch, loads, profile) for batch in batches)
    return (predicted / sum(batch.seconds for batch in batches) - 1) * 100


def predicted_s(batch: RunBatch, loads: Mapping[str, JobLoad], profile: Profile) -> float:
    given = [(loads[job], tokens) for job, tokens in batch.tokens.items()]
    nano_batch = NanoBatch(
        rows=batch.rows,
        squares=sum(tokens * load.squares_per_token for load, tokens in given),
        segments=tuple(Segment(tokens, load.rank, load.coverage) for load, tokens in given),
    )
    after_s = profile.steps.seconds(
        passes=min(1, len(batch.steps)),
        jobs=len(batch.steps),
        parameters=sum(adapter_parameters(profile, loads[job]) for job in batch.steps),
    )
    return profile.time.seconds(nano_batch) + after_s
