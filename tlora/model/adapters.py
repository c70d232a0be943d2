"""The adapter as a value: its matrices by module path, in PEFT's orientation, and how a new one
starts."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """The two matrices of one linear: y += scale * x a^T b^T."""

    a: torch.Tensor
    """[rank, in], float32."""

    b: torch.Tensor
    """[out, rank], float32."""


AdapterWeights = dict[str, LoraPair]
"""By module path in the Hugging Face model."""


def new_pair(path: str, *, seed: int, rank: int, in_features: int, out_features: int) -> LoraPair:
    """A uniform in +-1/sqrt(in) (PEFT's Kaiming start), B zero; keyed by (seed, path), so that it
    is the same on any device, in any company and whatever other modules the job adapts."""
    digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    bound = in_features**-0.5
    a = generator.uniform(-bound, bound, size=(rank, in_features)).astype(np.float32)
    # Turned as a pool holds it.
    return LoraPair(a=torch.from_numpy(a), b=torch.zeros(rank, out_features).t())


def first_beyond(weights: AdapterWeights, dtype: torch.dtype) -> str | None:
    """The first module with a weight that is no finite number in this format."""
    if not weights:
        return None
    # A 2-norm is no smaller than the largest weight, and found sooner.
    norms = torch._foreach_norm(
        [matrix for pair in weights.values() for matrix in (pair.a, pair.b)]
    )
    if bool((torch.stack(list(norms)) <= torch.finfo(dtype).max).all()):
        return None
    for path, pair in weights.items():
        for matrix in (pair.a, pair.b):
            if not torch.linalg.vector_norm(matrix, float("inf")).to(dtype).isfinite():
                return path
    return None
