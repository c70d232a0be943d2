"""Whoever is refused a directory hears which processes have it, and what to do about them."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tlora.core.errors import SpecError
from tlora.runtime import directory
from tlora.runtime.directory import HOLDER, RunDirectory
from tlora.runtime.holding import Holder, Keeper, keepers, way_out

HERE = Holder(os.getpid(), socket.gethostname(), "tlora train jobs.yaml")


@pytest.fixture(scope="module")
def gone() -> Holder:
    """A process that was here."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    return Holder(ended.pid, HERE.host, HERE.command)


@pytest.fixture
def taken(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.take()
    return run


@pytest.fixture
def worker(taken: RunDirectory) -> Iterator[int]:
    """Has the directory, and whoever took it for itself has not any more."""
    assert taken.lock is not None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, pass_fds=[taken.lock]) as it:
        taken.close()
        yield it.pid
        it.kill()


def test_processes_that_have_a_directory_are_found(taken: RunDirectory, worker: int) -> None:
    """By their lock: one that has it open only, as this one, does not keep anybody out."""
    handle = os.open(taken.root, os.O_RDONLY)
    assert keepers(taken.root) == [Keeper(worker, is_stopped=False)]
    os.close(handle)
    os.kill(worker, signal.SIGSTOP)
    os.waitpid(worker, os.WUNTRACED)
    assert keepers(taken.root) == [Keeper(worker, is_stopped=True)]
    assert keepers(taken.root.parent) == []


def test_a_stopped_worker_is_not_waited_for(
    taken: RunDirectory, worker: int, gone: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not end by itself, and the message says which process it is."""
    monkeypatch.setattr(directory, "PATIENCE_S", 0.1)
    taken.write_json(taken.root / HOLDER, asdict(gone))
    os.kill(worker, signal.SIGSTOP)
    os.waitpid(worker, os.WUNTRACED)
    with pytest.raises(SpecError, match=rf"\(workers that are left of .*process {worker} has it "):
        RunDirectory(taken.root).take()


def test_a_worker_that_does_not_end_is_named(
    taken: RunDirectory, worker: int, gone: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it was waited for."""
    monkeypatch.setattr(directory, "PATIENCE_S", 0.0)
    monkeypatch.setattr(directory, "ORPHANS_S", 0.2)
    taken.write_json(taken.root / HOLDER, asdict(gone))
    with pytest.raises(SpecError, match=rf"should be gone: kill -KILL {worker} ends it, "):
        RunDirectory(taken.root).take()


def test_the_way_out_is_that_of_the_case(gone: Holder) -> None:
    """Nobody is told to end a run that is well."""
    running, stopped = Keeper(7, is_stopped=False), Keeper(8, is_stopped=True)
    wait = "wait for it, or name another directory"
    assert way_out(HERE, [running]) == way_out(None, [running]) == way_out(gone, []) == wait
    assert way_out(HERE, [stopped, Keeper(9, is_stopped=True)]).startswith(
        "processes 8 9 have it and are stopped: kill -CONT 8 9 lets them go on, kill -KILL 8 9 ends"
    )
    assert way_out(gone, [running, stopped]).startswith("process 8 has it and is stopped: ")
    assert way_out(gone, [running]).startswith("process 7 has it and should be gone: kill -KILL 7")
