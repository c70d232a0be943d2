"""A run has its directory until its report is there: whoever comes next finds the whole of it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.runs import job_file

from tlora.config import load_spec
from tlora.core.errors import SpecError
from tlora.core.plan import Plan
from tlora.runtime import directory, training
from tlora.runtime.directory import RunDirectory
from tlora.runtime.group.running import train_in_group
from tlora.runtime.report import write_report
from tlora.runtime.scheduled import train_on_devices
from tlora.runtime.training import train

pytestmark = pytest.mark.multi_process

WAYS: dict[str, Callable] = {
    "one device": train,
    "two devices": partial(train_on_devices, devices=2),
    "two ranks": partial(train_in_group, plan=Plan(bucket=128, replicas=2)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_directory_is_taken_until_its_report_is_written(way, base, rows, tmp_path, monkeypatch):
    seen: list[Path] = []

    def write(root: Path) -> Path:
        with pytest.raises(SpecError, match="another tlora is at work"):
            RunDirectory(root).take()
        seen.append(root)
        return write_report(root)

    monkeypatch.setattr(training, "write_report", write)
    monkeypatch.setattr(directory, "PATIENCE_S", 0.0)
    jobs = ({"name": name, "data": {"path": str(rows)}} for name in ("one", "two"))
    root = tmp_path / "run"
    assert not WAYS[way](load_spec(job_file(base, *jobs)), output=root).failed
    assert seen == [root] and (root / "report.html").exists()
    # And from then on it is anybody's.
    after = RunDirectory(root)
    after.take()
    after.close()
