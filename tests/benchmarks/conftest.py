"""Scripts are loaded as they are run: with their own folder to import from."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load_script(monkeypatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def run_script(monkeypatch, tmp_path) -> Callable[..., dict[str, object]]:
    """Runs a script of a name with arguments; what its JSON line says."""
    monkeypatch.syspath_prepend(str(FOLDER))
    line = tmp_path / "line.jsonl"

    def run(name: str, *arguments: str) -> dict[str, object]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        script = importlib.import_module(name)
        script.main([*arguments, "--device", "cpu", "--json", str(line)])
        return json.loads(line.read_text().splitlines()[-1])

    return run
