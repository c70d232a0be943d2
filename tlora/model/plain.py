"""An adapter applied the plain way, by hooks: what exported files are checked with.

It shares no code with the pool and the kernels, so a wrong prefix, a transposed matrix or a lost
scale shows.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from tlora.model.adapters import AdapterWeights, LoraPair


@contextmanager
def plain_adapter(model: nn.Module, weights: AdapterWeights, scale: float) -> Iterator[None]:
    """While entered, every named linear of the model adds scale * x a^T b^T to its output."""

    def adds(pair: LoraPair):
        a, b = (matrix.to(next(model.parameters()).device) for matrix in (pair.a, pair.b))

        def hook(module, arguments, output):
            delta = scale * (arguments[0].to(a.dtype) @ a.T) @ b.T
            return (output.to(a.dtype) + delta).to(output.dtype)

        return hook

    hooks = [
        model.get_submodule(path).register_forward_hook(adds(pair))
        for path, pair in weights.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
