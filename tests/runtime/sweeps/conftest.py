"""Sweeps that nothing has disturbed: one in this process, and two tasks over worker processes."""

from pathlib import Path
from typing import Any

import pytest
from support.sweeps import lines, sweep_file
from support.tasks import run, tasks_file

import tlora


@pytest.fixture(scope="package")
def file(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tasks_file(base, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="package")
def done(file: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With early exit, on two devices."""
    output = tmp_path_factory.mktemp("done") / "run"
    found = run(file, output)
    assert not found.interrupted and set(found.studies) == {"one", "two"}
    return output


@pytest.fixture(scope="package")
def swept(base, rows, tmp_path_factory) -> Path:
    """An undisturbed sweep."""
    output = tmp_path_factory.mktemp("swept") / "run"
    study = tlora.tune(tlora.load_sweep(sweep_file(base, rows)), output=output, view=lines())
    assert study.best is not None
    return output
