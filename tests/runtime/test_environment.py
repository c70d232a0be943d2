"""What the surroundings decide."""

import pytest

from tlora.core.errors import SpecError
from tlora.runtime.environment import cache_directory


def test_the_cache_is_where_the_variable_says(tmp_path, monkeypatch):
    """And is made if it is not there."""
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "deep" / "cache"))
    assert cache_directory() == tmp_path / "deep" / "cache"
    assert cache_directory().is_dir()


def test_a_cache_that_cannot_be_made_is_an_error_that_names_the_variable(tmp_path, monkeypatch):
    """Below a file there is no directory."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SpecError, match="TLORA_CACHE"):
        cache_directory()
