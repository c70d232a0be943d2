"""Where weights lie, and what gathering them moves."""

from dataclasses import replace

import pytest

from tlora.core.errors import SpecError
from tlora.costs.layout import NAMED, Unit, gathers_of, llama_layout, named_layout

SMALL = llama_layout(
    "small",
    hidden=96,
    intermediate=200,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=24,
    vocabulary=1000,
)


def test_a_shard_has_whole_rows_and_is_padded_to_the_same_everywhere() -> None:
    """Ten rows over four ranks are three on each; a norm is cut by its values."""
    unit = Unit(((10, 7), (5, 1)))
    assert unit.parameters == 75
    assert unit.shard_values(1) == 75
    assert unit.shard_values(4) == 3 * 7 + 2
    assert unit.shard_values(100) == 7 + 1


def test_a_nano_batch_gathers_every_layer_twice_and_the_tables_once() -> None:
    """Counted by hand for eight ranks; kept layers are not gathered again, one rank gathers
    nothing."""
    layer = (12 + 6 + 6) * 96 + 12 * 96 + 25 * 96 * 2 + 12 * 200 + 12 + 12
    tables, norm = 2 * 125 * 96, 12
    found = gathers_of(SMALL, 8)
    assert found.calls == 12
    assert found.moved_bytes == 8 * 2 * (tables + 2 * norm + 8 * layer)
    kept = gathers_of(SMALL, 8, kept_layers=3)
    assert kept.moved_bytes == 8 * 2 * (tables + 2 * norm + 2 * layer)
    assert gathers_of(SMALL, 8, kept_layers=4).calls == 4
    assert gathers_of(SMALL, 1).calls == gathers_of(SMALL, 1).moved_bytes == 0
    assert found.moved_bytes != 8 * 2 * (2 * tables + 2 * norm + 8 * layer)


def test_a_tied_head_gathers_the_embeddings_again() -> None:
    """Its weight is held once and gathered twice."""
    tied = replace(SMALL, head=None)
    assert tied.parameters == SMALL.parameters - 1000 * 96
    assert gathers_of(tied, 8) == gathers_of(SMALL, 8)


def test_named_shapes_have_the_parameters_of_the_models() -> None:
    """As their makers count them."""
    counts = {name: layout.parameters for name, layout in NAMED.items()}
    assert counts == {
        "llama-1b": 1_235_814_400,
        "llama-8b": 8_030_261_248,
        "qwen-32b": 32_763_876_352,
        "llama-70b": 70_553_706_496,
    }
    with pytest.raises(SpecError, match="none of llama-1b"):
        named_layout("llama-9b")
