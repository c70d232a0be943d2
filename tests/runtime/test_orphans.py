"""Workers whose leader was killed: the directory is not anybody else's before they are gone."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from support.runs import job_file
from support.task_faults import EVALUATED, long_in_training
from support.tasks import tasks_file

from tlora.core.errors import SpecError
from tlora.runtime import directory
from tlora.runtime.directory import RunDirectory

pytestmark = pytest.mark.multi_process

SUPPORT = Path(__file__).parents[1] / "support"
RUNNERS = {"train": ("lead_runner.py", "step"), "tune": ("tasks_runner.py", "turn evaluated")}
"""And what they say when a worker is at work."""


@pytest.mark.parametrize("command", RUNNERS)
def test_a_directory_is_taken_as_long_as_a_worker_lives(command, base, rows, tmp_path):
    """Whoever comes does not wait for workers that are stopped, and says whose they are and what to
    do. When that is done they notice and end, and are waited for."""
    jobs = ({"name": name, "data": {"path": str(rows)}} for name in ("one", "two"))
    file = job_file(base, *jobs) if command == "train" else tasks_file(base, tmp_path)
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(file))
    runner, working = RUNNERS[command]
    root = tmp_path / "run"
    leader = subprocess.Popen(
        [sys.executable, SUPPORT / runner, tmp_path / "file.yaml", root, "1"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert leader.stdout is not None
    try:
        assert any(line.startswith(working) for line in leader.stdout)
        os.killpg(leader.pid, signal.SIGSTOP)
        leader.kill()
        leader.wait()
        began = time.monotonic()
        left = rf"\(workers that are left of process {leader.pid} on "
        with pytest.raises(SpecError, match=f"another tlora is at work in .*{left}") as refused:
            RunDirectory(root).take()
        assert time.monotonic() - began < directory.ORPHANS_S / 3
        advice = re.search(r"kill -CONT [0-9 ]+", str(refused.value))
        assert advice is not None, refused.value
        subprocess.run(advice[0].split(), check=True)
        take_and_leave(root)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
        leader.communicate()


def take_and_leave(root: Path) -> None:
    """Raises SpecError if somebody is still there."""
    free = RunDirectory(root)
    free.take()
    free.close()


def test_a_worker_in_the_middle_of_something_ends_with_its_leader(base, tmp_path):
    """It does not have to come to its pipe for that."""
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(tasks_file(base, tmp_path)))
    root, runner = tmp_path / "run", SUPPORT / "tasks_runner.py"
    leader = subprocess.Popen(
        [sys.executable, runner, tmp_path / "file.yaml", root, "1", long_in_training.__name__],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not (root / EVALUATED).exists():
            assert leader.poll() is None
            time.sleep(0.01)
        leader.kill()
        leader.wait()
        take_and_leave(root)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
