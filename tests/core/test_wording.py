"""Words that messages share."""

import pytest

from tlora.core.wording import number_of


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1.0, "1 step"), (0.5, "0.5 steps"),
     (12_345_678, "12345678 steps")],
)  # fmt: skip
def test_one_thing_is_one(count: float, said: str) -> None:
    assert number_of(count, "step") == said
