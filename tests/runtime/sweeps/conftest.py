"""Two tasks over worker processes, and a run of them that nothing has disturbed."""

from pathlib import Path
from typing import Any

import pytest
from support.tasks import run, tasks_file


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
