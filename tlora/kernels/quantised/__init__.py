"""Frozen weights in fewer bits."""

from tlora.kernels.quantised.weights import (
    FORMATS,
    QuantisedWeight,
    dense,
    quantise,
    quantised_bytes,
)

__all__ = ["FORMATS", "QuantisedWeight", "dense", "quantise", "quantised_bytes"]
