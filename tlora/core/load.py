"""What the costs of a job depend on, and nothing else of it."""

from dataclasses import dataclass

from tlora.core.errors import SpecError


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLoad:
    """What the costs of a job depend on."""

    rank: int
    batch_size: int
    """Sequences per optimiser step."""

    lengths: tuple[int, ...]
    """Tokens of its sequences: one number, or a sample of its data."""

    weight: float = 1.0
    """Its share of tokens in a nano-batch, against those of its neighbours."""

    coverage: float = 1.0
    """The part of all linears that it adapts, by their widths: 1 is all-linear."""

    def __post_init__(self) -> None:
        for name, value in (("rank", self.rank), ("batch_size", self.batch_size)):
            if value < 1:
                raise SpecError(f"must be at least 1, got {value}", field=name)
        if not self.lengths or min(self.lengths) < 1:
            raise SpecError("must be one length or more, each at least 1", field="lengths")
        if self.weight <= 0 or not 0 < self.coverage <= 1:
            raise SpecError("weight must be above 0, coverage in (0, 1]", field="weight, coverage")

    @property
    def mean_length(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    @property
    def batch_tokens(self) -> float:
        return self.batch_size * self.mean_length

    @property
    def squares_per_token(self) -> float:
        return sum(length**2 for length in self.lengths) / sum(self.lengths)
