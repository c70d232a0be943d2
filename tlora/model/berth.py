"""Rank rows that are kept for a job on its way, with all that is to be done when it is attached.

In a deep model a job has hundreds of matrices, and finding their rows takes longer than copying
into them. So whoever brings a job finds them, in a thread of its own; what its neighbours wait for
when it is attached is a few copies.
"""

from dataclasses import dataclass

import torch

from tlora.model.adapters import AdapterWeights
from tlora.model.job_rows import JobRows, Moments
from tlora.model.rank_rows import Copies


@dataclass(frozen=True, slots=True)
class Entry:
    """The rows of a job and what is to be copied into them. Good until a pool grows."""

    rows: JobRows
    copies: Copies

    def fill(self) -> None:
        for targets, sources in self.copies:
            torch._foreach_copy_(targets, sources)


class Berth:
    """Rows are kept as long as somebody holds on to it: whoever brings a job and then does not
    attach it has nothing to give back."""

    def __init__(self, weights: AdapterWeights, moments: Moments) -> None:
        self._weights, self._moments = weights, moments
        self.entry: Entry | None = None
        """None once the rows are a job's, or kept no longer because others had no room."""

    def is_for(self, weights: AdapterWeights, moments: Moments) -> bool:
        """Whether it is kept for these very tensors."""
        return (
            self._weights is weights
            and self._moments.keys() == moments.keys()
            and all(self._moments[kind] is tensors for kind, tensors in moments.items())
        )
