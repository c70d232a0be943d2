"""What one job owns in the pools, every piece of it found once.

In a deep model that is hundreds of matrices with their gradients and moments, and they are wanted
whenever the job is evaluated, saved or leaves: finding them anew would take longer than what is
done with them. They are good as long as the job stays and no pool grows.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from tlora.model.adapters import AdapterWeights, LoraPair
from tlora.model.rank_rows import Places, RankRows, RowViews, rows_of

Cut = list[tuple[str, int]]
"""Names and ranks of the matrices that lie in a part, one below the other."""

Held = dict[str, dict[str, torch.Tensor]]
"""What a job's rows hold: by `value`, `exp_avg` or `exp_avg_sq`, then by `PATH.lora_A` and
`PATH.lora_B`, as they lie in the pool."""

Moments = Mapping[str, Mapping[str, torch.Tensor]]
"""The optimiser's, of a job that goes on: by `exp_avg` and `exp_avg_sq`, then as above."""


class Part(NamedTuple):
    """Rows of a pooled matrix."""

    matrix: RankRows
    first: int
    rows: int
    cut: Cut


class JobRows:
    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self._found: dict[str, list[torch.Tensor]] = {}
        self._matrices: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def cuts(self) -> list[Cut]:
        """Of each part."""
        return [part.cut for part in self.parts]

    def of(self, kind: str) -> list[torch.Tensor]:
        """Of each part its rows of `value`, `grad`, `exp_avg` or `exp_avg_sq`."""
        if kind not in self._found:
            index = RowViews._fields.index(kind)
            self._found[kind] = [
                rows_of(matrix.tensors[index], first, rows) for matrix, first, rows, _ in self.parts
            ]
        return self._found[kind]

    def flat(self, kind: str) -> list[torch.Tensor]:
        """The same as vectors."""
        key = f"flat {kind}"
        if key not in self._found:
            self._found[key] = [rows.view(-1) for rows in self.of(kind)]
        return self._found[key]

    def matrices(self, kind: str) -> dict[str, torch.Tensor]:
        """The same by `PATH.lora_A` and `PATH.lora_B`, B turned as it lies in the pool."""
        if kind not in self._matrices:
            self._matrices[kind] = cut(self.of(kind), self.cuts)
        return self._matrices[kind]

    @cached_property
    def views(self) -> dict[str, RowViews]:
        """All kinds, `PATH.lora_A` before `PATH.lora_B`: the order in which norms are summed."""
        kinds = [self.matrices(kind) for kind in RowViews._fields]
        names = (f"{path}.lora_{side}" for path in paths_of(kinds[0]) for side in "AB")
        return {name: RowViews(*(kind[name] for kind in kinds)) for name in names}

    @cached_property
    def copied(self) -> Places:
        """(copy for kernels, matrix) where there are copies."""
        return [
            (rows_of(matrix.operand, first, rows), value)
            for (matrix, first, rows, _), value in zip(self.parts, self.of("value"), strict=True)
            if matrix.has_copy
        ]

    @property
    def slices(self) -> list[torch.Tensor]:
        """All that there is: matrices, gradients, moments, and the copies for kernels."""
        kinds = [rows for kind in RowViews._fields for rows in self.of(kind)]
        return [*kinds, *(copy for copy, _ in self.copied)]

    def places(self, weights: AdapterWeights) -> Places:
        """For each matrix that is to be filled in."""
        rows, found = self.matrices("value"), Places()
        for path in paths_of(rows):
            pair = weights[path]
            found.append((rows[f"{path}.lora_A"], pair.a))
            # Turned as it lies in the pool: so it does in most that come here, and is copied along.
            found.append((rows[f"{path}.lora_B"], pair.b.t()))
        return found

    def moment_places(self, moments: Moments) -> Places:
        """The same of the optimiser's moments."""
        return [
            (matrix, tensors[name])
            for kind, tensors in moments.items()
            for name, matrix in self.matrices(kind).items()
        ]


def cut(parts: list[torch.Tensor], cuts: list[Cut]) -> dict[str, torch.Tensor]:
    """The matrices that lie in these parts."""
    found: dict[str, torch.Tensor] = {}
    for part, names in zip(parts, cuts, strict=True):
        if len(names) == 1:
            found[names[0][0]] = part
            continue
        matrices = part.split_with_sizes([rank for _, rank in names])
        for (name, _), matrix in zip(names, matrices, strict=True):
            found[name] = matrix
    return found


def paths_of(names: Iterable[str]) -> list[str]:
    return [name.removesuffix(".lora_A") for name in names if name.endswith(".lora_A")]


def adapter_of(values: Mapping[str, torch.Tensor]) -> AdapterWeights:
    """Matrices by `PATH.lora_A` and `PATH.lora_B`, as they lie in the pool, as an adapter: another
    way to look at the same memory."""
    return {
        path: LoraPair(a=values[f"{path}.lora_A"], b=values[f"{path}.lora_B"].t())
        for path in paths_of(values)
    }


def held_of(copies: list[torch.Tensor], kinds: Sequence[str], cuts: list[Cut]) -> Held:
    """Of flat copies of the parts, first those of the first kind."""
    held: Held = {}
    for number, kind in enumerate(kinds):
        of_kind = copies[number * len(cuts) : (number + 1) * len(cuts)]
        held[kind] = cut([_in_rows(*each) for each in zip(of_kind, cuts, strict=True)], cuts)
    return held


def of_weights(held: Held) -> AdapterWeights:
    """The adapter in it."""
    return adapter_of(held["value"])


def _in_rows(part: torch.Tensor, names: Cut) -> torch.Tensor:
    return part.view(sum(rank for _, rank in names), -1)
