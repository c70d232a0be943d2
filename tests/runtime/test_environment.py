"""What the surroundings decide."""

from pathlib import Path

import pytest

from tlora.core.errors import SpecError
from tlora.runtime.environment import cache_directory


def test_the_cache_is_where_the_variable_says(tmp_path, monkeypatch):
    """And is made if it is not there."""
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "deep" / "cache"))
    assert cache_directory() == tmp_path / "deep" / "cache"
    assert cache_directory().is_dir()


def test_a_user_without_a_home_is_told_of_the_variable(monkeypatch):
    """As in many containers."""

    def nobodys_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TLORA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", nobodys_home)
    with pytest.raises(SpecError, match="no place for tokenised data: Could not"):
        cache_directory()


def test_a_cache_that_cannot_be_made_is_an_error_that_names_the_variable(tmp_path, monkeypatch):
    """Below a file there is no directory."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SpecError, match="TLORA_CACHE"):
        cache_directory()
