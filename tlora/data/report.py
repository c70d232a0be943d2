"""What was found in a job's data, in numbers and in a few lines for people."""

from dataclasses import dataclass

import numpy as np

NAMED_EMPTY = 3
"""Rows with an empty answer that are told by their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthQuantiles:
    """Tokens of the rows before any are cut or left out."""

    median: int
    p90: int
    p99: int
    longest: int

    @classmethod
    def of(cls, lengths: np.ndarray) -> "LengthQuantiles":
        median, p90, p99 = np.quantile(lengths, (0.5, 0.9, 0.99), method="inverted_cdf")
        return cls(median=int(median), p90=int(p90), p99=int(p99), longest=int(lengths.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """Row counts are of training and held-out rows together, unless named otherwise."""

    detected: str
    """The shape of the rows and the keys it was told by."""

    rendering: str
    """How rows became text."""

    pairs: bool = False
    """Whether a row is a preference pair; lengths are then of one side, prompt included."""

    rows_read: int
    rows_dropped: int
    """Left out because they were too long."""

    rows_truncated: int
    rows_empty: int = 0
    """With an answer of nothing, or of white space: its end is all that is trained on."""

    empty_at: tuple[str, ...] = ()
    """Where the first of these are."""

    max_length: int

    train_rows: int
    train_tokens: int
    """In one pass over the training rows, after cutting."""

    train_targets: int
    """Of these, the tokens that carry loss."""

    eval_rows: int
    lengths: LengthQuantiles
    from_cache: bool
    """Whether the tokens were there already."""

    def lines(self) -> list[str]:
        share = self.train_targets / self.train_tokens
        known = " (tokenised before)" if self.from_cache else ""
        rows, length = ("pairs", "length of a side") if self.pairs else ("rows", "row length")
        report = [
            f"{self.rows_read:,} {rows} of {self.detected}, {self.rendering}{known}",
            f"training: {self.train_rows:,} {rows}, {self.train_tokens:,} tokens, "
            f"{self.train_targets:,} of them trained ({share:.0%})",
            f"{length}: median {self.lengths.median:,}, p90 {self.lengths.p90:,}, "
            f"p99 {self.lengths.p99:,}, longest {self.lengths.longest:,} tokens",
        ]
        if self.eval_rows:
            report.append(f"held out: {self.eval_rows:,} {rows}")
        if self.rows_truncated:
            report.append(f"cut to {self.max_length:,} tokens: {self.rows_truncated:,} {rows}")
        if self.rows_dropped:
            report.append(
                f"left out, over {self.max_length:,} tokens: {self.rows_dropped:,} {rows}"
            )
        if self.rows_empty:
            more = self.rows_empty - len(self.empty_at)
            places = ", ".join(self.empty_at) + (f" and {more:,} more" if more else "")
            report.append(
                f"empty answers, of which only the end is trained: {self.rows_empty:,} {rows} "
                f"({places})"
            )
        return report
