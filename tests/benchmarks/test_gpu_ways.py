"""What is asked of `gpu_ways.py`: settings by name, in force and undone. It times GPUs alone."""

from dataclasses import replace
from types import ModuleType

import pytest

from tlora.kernels.multi_lora import settings

pytest.importorskip("triton", reason="Triton is not installed: pip install '.[test]'")


@pytest.fixture
def module(load_script) -> ModuleType:
    return load_script("gpu_ways")


def test_a_way_changes_lines_of_the_table_while_it_is_in_force(module: ModuleType) -> None:
    way = module.parse_way(
        "both = reduce_b large: sent=False stages=4 reload=False; expand_y: programs=3"
    )
    before = dict(settings.TUNINGS)
    with way.in_force():
        assert settings.TUNINGS["reduce_b large"] == replace(
            before["reduce_b large"], sent=False, stages=4, reload=False
        )
        assert settings.TUNINGS["expand_y"] == replace(before["expand_y"], programs=3)
        changed = {line for line in before if settings.TUNINGS[line] != before[line]}
        assert changed == {"reduce_b large", "expand_y"}
    assert before == settings.TUNINGS
    assert way.name == "both"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("reduce_b large: sent=64", "a way is NAME"),
        ("two words = expand_y: sent=64", "one word"),
        ("x = reduce: sent=64", "no line 'reduce'"),
        ("x = expand_y: speed=2", "no field 'speed'"),
    ],
)
def test_what_is_misspelt_is_refused(module: ModuleType, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        module.parse_way(text)
