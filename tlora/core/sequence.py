"""One tokenised training example: what the data layer hands to the engine."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

IGNORED = -100
"""The label of a token that is not trained on, as everywhere in the Hugging Face world."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """`labels[i]` is `input_ids[i]` where token i is trained on, else IGNORED. The shift by one is
    the loss's business: token i is predicted from what stands before it, so `labels[0]` never
    counts."""

    input_ids: np.ndarray
    """int32 [length]."""

    labels: np.ndarray
    """int32 [length]."""

    origin: str = ""
    """Where the row came from ("file:line"), for messages."""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_targets(self) -> int:
        """Tokens that carry loss."""
        return int((self.labels[1:] != IGNORED).sum())


class Sequences(Protocol):
    """Rows that can be read one by one, in any order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> TokenSequence: ...
