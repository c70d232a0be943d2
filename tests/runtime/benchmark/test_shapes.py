"""Named shapes, looked at before they are allocated."""

import pytest
import torch

from tlora.core.errors import SpecError
from tlora.runtime.benchmark import shapes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama-8b", 8_030_261_248), ("llama-1b", 1_235_814_400), ("demo", 722_048)],
)
def test_named_shapes_have_the_parameters_of_their_models(name: str, parameters: int) -> None:
    """As published for Llama-3.1-8B and Llama-3.2-1B."""
    shape = shapes.look_at(name, "auto", CPU)
    assert shape.parameters == parameters
    assert shape.matmul_parameters <= parameters
    assert shape.dtype is torch.float32


def test_a_shape_that_does_not_fit_is_refused_with_what_would_help() -> None:
    """Half of the bytes in bfloat16 fit where float32 does not."""
    full = shapes.look_at("llama-8b", "auto", CPU)
    half = shapes.look_at("llama-8b", "bfloat16", CPU)
    asked = {"budget_tokens": 1024, "total_rank": 120}
    assert full.needed_bytes(**asked) > 4 * full.parameters
    free = half.needed_bytes(**asked)
    shapes.check_fits(half, CPU, **asked, free=free)
    shapes.check_fits(full, CPU, **asked, free=None)
    with pytest.raises(SpecError, match=r"--shape: llama-8b in float32 needs about .* GiB"):
        shapes.check_fits(full, CPU, **asked, free=free)


def test_random_weights_are_the_same_every_time_and_never_zero(monkeypatch) -> None:
    """And making them leaves the global generator alone."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 2}
    monkeypatch.setitem(shapes.RANDOM_SHAPES, "llama-1b", small)
    shape = shapes.look_at("llama-1b", "bfloat16", CPU)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = shapes.load(shape, CPU), shapes.load(shape, CPU)
    assert torch.equal(torch.rand(3), expected)
    for (name, value), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert value.dtype is torch.bfloat16 and torch.equal(value, other)
        assert value.float().abs().mean() > 1e-3, name


def test_twins_share_weights_and_nothing_else(plain) -> None:
    """Weights are not copied; modules and configuration are."""
    twin = shapes.twin(plain)
    assert {p.data_ptr() for p in twin.parameters()} == {p.data_ptr() for p in plain.parameters()}
    assert twin.config is not plain.config
    assert twin.get_input_embeddings() is not plain.get_input_embeddings()
