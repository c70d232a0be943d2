"""One tokenised training example: what the data layer hands to the engine."""

import hashlib
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

    @property
    def sequences(self) -> "tuple[TokenSequence, ...]":
        return (self,)


@dataclass(frozen=True, slots=True, eq=False)
class TokenPair:
    """Two answers to one prompt, of which the first is the better one. Each is a sequence of its
    own, prompt included; their loss is of both together."""

    chosen: TokenSequence
    rejected: TokenSequence

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)

    @property
    def origin(self) -> str:
        return self.chosen.origin

    @property
    def num_targets(self) -> int:
        return self.chosen.num_targets + self.rejected.num_targets

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        return (self.chosen, self.rejected)

    @property
    def digest(self) -> bytes:
        """The same for pairs of the same tokens and labels."""
        found = hashlib.blake2b(digest_size=16)
        for sequence in self.sequences:
            found.update(len(sequence).to_bytes(8, "little"))
            found.update(sequence.input_ids.tobytes())
            found.update(sequence.labels.tobytes())
        return found.digest()


Unit = TokenSequence | TokenPair
"""What is never split: its sequences run through the model in one nano-batch."""


class Sequences(Protocol):
    """Rows that can be read one by one, in any order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Unit: ...
