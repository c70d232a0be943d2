"""The flat example is the first thing a reader runs: it runs, and its check can fail."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "two_jobs.py"


def load():
    spec = importlib.util.spec_from_file_location("two_jobs", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["two_jobs"] = module
    spec.loader.exec_module(module)
    return module


def test_the_example_runs_and_shows_both_jobs():
    """As a reader would start it; no lock-step: two steps of one job for each of the other."""
    shown = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    assert "small: 120 steps" in shown.stdout
    assert "large: 60 steps" in shown.stdout


def test_its_check_refuses_a_leak(monkeypatch):
    """A twin in which sequences see each other's rows does not get through."""
    example = load()

    def leaking(x, lengths):
        return x.cumsum(0) / example.torch.arange(1, len(x) + 1)[:, None]

    monkeypatch.setattr(example, "mix", leaking)
    with pytest.raises(AssertionError, match="was disturbed by its neighbour"):
        example.main()
