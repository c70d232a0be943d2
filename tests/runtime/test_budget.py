"""The size of a nano-batch where nobody said."""

import pytest
import torch

from tlora.runtime.budget import default_budget


@pytest.mark.parametrize(
    ("device", "parameters", "exact", "tokens"),
    [
        ("cpu", 700_000, False, 2048),
        ("cpu", 700_000, True, 1024),
        ("cpu", 600_000_000, False, 1024),
        ("cuda", 8_000_000_000, False, 8192),
    ],
)
def test_the_default_follows_device_and_model(device, parameters, exact, tokens):
    """Small models on a CPU take more tokens, unless every nano-batch is filled up."""
    assert default_budget(torch.device(device), parameters, exact=exact) == tokens
