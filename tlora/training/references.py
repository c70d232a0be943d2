"""What the base model alone makes of preference pairs: computed once for each pair, for all jobs.

The adapter never changes it, so a pair's reference is computed in a forward pass without adapters
just before the pair is trained or evaluated on for the first time, and kept: another epoch, and
another job with the same pair, find it here. In the nano-batch that trains the pair it would cost
as much again in every epoch, and a backward pass through rows that need none.

Values stay on the device, where they are needed; they reach the host, for figures, with the losses
of the pass that made them, which is reported before any pass that was launched after it.
"""

import math

import torch

from tlora.core.sequence import TokenPair

FIRST_PAIRS = 256


class References:
    """Belongs to one engine: to one base model in one number format."""

    def __init__(self, device: torch.device) -> None:
        self._places: dict[bytes, int] = {}
        self._launched: list[bool] = []
        self._host: list[tuple[float, float]] = []
        self._values = torch.zeros(0, 2, dtype=torch.float64, device=device)

    def __len__(self) -> int:
        """Pairs whose reference is known, or under way."""
        return sum(self._launched)

    def place(self, pair: TokenPair) -> int:
        """Of its reference, which may still be missing; the same for pairs that are alike."""
        place = self._places.setdefault(pair.digest, len(self._launched))
        if place == len(self._launched):
            self._launched.append(False)
            self._host.append((math.nan, math.nan))
        return place

    def has(self, place: int) -> bool:
        """It is known, or will be before what is launched next begins."""
        return self._launched[place]

    def write(self, places: list[int], index: torch.Tensor, sums: torch.Tensor) -> None:
        """A pass was launched that gives them: `index` is `places` on the device, `sums` float64
        [P, 2]."""
        self._reserve()
        self._values[index] = sums
        for place in places:
            self._launched[place] = True

    def read(self, index: torch.Tensor) -> torch.Tensor:
        """float64 [P, 2], on the device."""
        return self._values[index]

    def tell(self, place: int, sums: tuple[float, float]) -> None:
        """The pass has come back."""
        self._host[place] = sums

    def of(self, place: int) -> tuple[float, float]:
        """As the host knows it."""
        return self._host[place]

    def _reserve(self) -> None:
        size = len(self._values)
        if size < len(self._launched):
            more = max(FIRST_PAIRS, len(self._launched), 2 * size)
            values = self._values.new_zeros(more, 2)
            values[:size] = self._values
            self._values = values
