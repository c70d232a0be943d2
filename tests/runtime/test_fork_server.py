"""Ctrl-C while the process that workers are forked from is still loading."""

import subprocess
import sys
from pathlib import Path

import pytest

LOADED = """
import time
open("loading", "w").close()
time.sleep(1.0)
"""
LEADER = """
import os, signal, time
from multiprocessing import forkserver
from tlora.runtime.fork_server import fork_server

if __name__ == "__main__":
    asked = []
    signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    context = fork_server(["loaded"])
    while not os.path.exists("loading"):
        time.sleep(0.01)
    os.killpg(0, signal.SIGINT)
    worker = context.Process(target=print, args=("worked",), kwargs={"flush": True})
    worker.start()
    worker.join()
    assert asked and worker.exitcode == 0
"""


@pytest.mark.multi_process
def test_an_interrupt_does_not_end_what_workers_are_forked_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the leader hears of it, and can still start what it needs to end well."""
    (tmp_path / "loaded.py").write_text(LOADED)
    (tmp_path / "leader.py").write_text(LEADER)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = [sys.executable, "leader.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, start_new_session=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "worked\n", "")
