"""Requests are looked for at every nano-batch: runs here are short."""

import pytest

from tlora.runtime.elastic import desk


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "LOOK_EVERY_S", 0.0)
