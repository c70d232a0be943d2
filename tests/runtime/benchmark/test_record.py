"""Where a line came from."""

import re

import pytest

from tlora.runtime.benchmark import record


@pytest.mark.parametrize(("said", "commit"), [("0a1b2c3", "0a1b2c3"), ("", None), (None, None)])
def test_without_a_checkout_the_environment_says_the_commit(
    said, commit, monkeypatch, tmp_path
) -> None:
    """Nothing, or an empty text, is not a commit."""
    monkeypatch.setattr(record, "PACKAGE", tmp_path)
    monkeypatch.delenv("TLORA_COMMIT", raising=False)
    if said is not None:
        monkeypatch.setenv("TLORA_COMMIT", said)
    assert record.commit() == commit


def test_a_checkout_knows_better_than_the_environment(monkeypatch) -> None:
    """A stale variable is not believed."""
    monkeypatch.delenv("TLORA_COMMIT", raising=False)
    found = record.commit()
    if found is None:
        pytest.skip("not a checkout")
    assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", found)
    monkeypatch.setenv("TLORA_COMMIT", "stale")
    assert record.commit() == found
