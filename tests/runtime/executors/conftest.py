"""Runs over a tiny base, for executors."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs import job_file, write_rows

from tlora.config import dump_spec, load_spec
from tlora.core.job import RunSpec

NewRun = Callable[..., tuple[RunSpec, Path]]


@pytest.fixture
def new_run(base: Path, tmp_path: Path) -> NewRun:
    """A run directory with these jobs, each on rows of its own."""

    def make(*names: str, folder: str = "run", **train: object) -> tuple[RunSpec, Path]:
        root = tmp_path / folder
        root.mkdir()
        jobs = []
        for number, name in enumerate(names):
            rows = write_rows(tmp_path / f"{name}.jsonl", 12, seed=number)
            own = {"seed": number, **train}
            jobs.append({"name": name, "data": {"path": str(rows)}, "train": own})
        spec = load_spec(job_file(base, *jobs))
        (root / "resolved.yaml").write_text(dump_spec(spec))
        return spec, root

    return make
