"""Threads that spin while they wait give way to other processes, and only to them."""

import os
import sys
import threading
import time
from io import StringIO
from pathlib import Path

import pytest
import torch
import yaml
from support.runs import job_file
from support.sweeps import lines, sweep_file

from tlora.config import load_spec, load_sweep
from tlora.runtime import giving_way as module
from tlora.runtime.environment import allowed_cores, busy_seconds, waiting_is_chosen
from tlora.runtime.giving_way import Look, Teams, giving_way, is_crowded, teams_needed
from tlora.runtime.progress import ProgressLines
from tlora.runtime.recording import Recorder
from tlora.runtime.sweeps.tune import tune
from tlora.runtime.training import train

CPU = torch.device("cpu")
ENDS_S = 60.0

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def two_threads(monkeypatch):
    """On cores of which nobody has said how threads wait for them."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def crowd(monkeypatch, *others: float) -> None:
    """Looks at a machine of two cores on which others want so many, the last of it for good."""
    wanted = list(others)
    seen = [Look(0.0, 0.0, 0.0)]

    def look() -> Look:
        last = seen[-1]
        more = wanted.pop(0) if len(wanted) > 1 else wanted[0]
        seen.append(Look(last.wall + 1.0, last.own + 2.0, last.busy + 2.0 + more))
        return last

    monkeypatch.setattr(module, "look", look)
    monkeypatch.setattr(module, "allowed_cores", lambda: 2)
    monkeypatch.setattr(module, "LOOK_S", 0.01)


def num_tasks() -> int:
    """Threads of this process, those of OpenMP too."""
    return len(os.listdir("/proc/self/task"))


def wait_until(holds) -> None:
    end = time.monotonic() + ENDS_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("threads", "cores", "others", "already", "crowded"),
    [
        (2, 2, 0.0, False, False),
        (2, 2, 0.7, False, True),
        # An editor, say; and one that is still there.
        (2, 2, 0.3, False, False),
        (2, 2, 0.3, True, True),
        (2, 2, 0.1, True, False),
        # Cores that the threads leave alone.
        (4, 8, 3.0, False, False),
        (4, 8, 5.0, False, True),
        # Ticks are counted otherwise than the time of a process.
        (2, 2, -0.2, True, False),
    ],
)
def test_others_count_where_they_want_cores_that_the_threads_need(
    threads, cores, others, already, crowded
):
    """Over half a second."""
    before = Look(wall=10.0, own=7.0, busy=30.0)
    now = Look(wall=10.5, own=7.8, busy=30.8 + others / 2)
    assert is_crowded(before, now, threads=threads, cores=cores, already=already) is crowded


@pytest.mark.parametrize(("threads", "cores"), [(2, 2), (2, 8), (4, 8), (5, 8), (3, 2), (16, 16)])
def test_with_the_teams_there_are_more_threads_than_cores_and_one_fewer_would_not_do(
    threads, cores
):
    """Or there is one, where threads are too many anyway."""
    teams = teams_needed(threads=threads, cores=cores)
    assert threads + teams * (threads - 1) > cores
    assert teams == 1 or threads + (teams - 1) * (threads - 1) <= cores


@linux
def test_teams_bring_threads_of_openmp_and_take_them_along(two_threads):
    """Which libgomp counts: it spins hardly at all as long as they are there."""
    torch.zeros(module.CUT_ELEMENTS).add_(1.0)
    before, teams = num_tasks(), Teams(2)
    teams.come()
    wait_until(lambda: num_tasks() == before + 4)
    assert teams.are_there
    teams.leave()
    assert not teams.are_there
    wait_until(lambda: num_tasks() == before)


@linux
def test_teams_are_there_while_others_want_the_cores(two_threads, monkeypatch):
    """They come with others, go with them, and do not outlive the training."""
    came: list[str] = []
    for name in ("come", "leave"):
        act = getattr(Teams, name)

        def noted(self, name=name, act=act):
            came.append(name)
            act(self)

        monkeypatch.setattr(Teams, name, noted)
    crowd(monkeypatch, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0)
    with giving_way(CPU):
        wait_until(lambda: len(came) == 3)
    assert came == ["come", "leave", "come", "leave"]
    assert not [each for each in threading.enumerate() if each.name == "giving-way"]


@pytest.mark.parametrize("variable", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_who_says_how_threads_wait_is_obeyed(two_threads, monkeypatch, variable):
    monkeypatch.setenv(variable, "1" if variable == "GOMP_SPINCOUNT" else "active")
    assert waiting_is_chosen()
    assert not watches(CPU)


@linux
def test_only_threads_that_wait_for_each_other_are_watched(two_threads):
    """A GPU's process, or one of one thread as `--devices` starts them, has none."""
    assert watches(CPU)
    assert not watches(torch.device("cuda"))
    torch.set_num_threads(1)
    assert not watches(CPU)


def watches(device: torch.device) -> bool:
    with giving_way(device):
        return "giving-way" in [each.name for each in threading.enumerate()]


@linux
def test_a_busy_core_is_seen():
    """And no more cores than there are."""
    before, start = busy_seconds(), time.monotonic()
    spent = time.process_time() + 0.3
    while time.process_time() < spent:
        pass
    after, wall = busy_seconds(), time.monotonic() - start
    assert before is not None and after is not None
    assert 0.2 <= after - before <= allowed_cores() * wall + 0.1


@linux
def test_jobs_and_trials_give_way_and_keep_their_bits(
    two_threads, monkeypatch, tmp_path: Path, base: Path, rows: Path
):
    """How threads wait is nobody's arithmetic."""
    job = {"name": "a", "data": {"path": str(rows)}}
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump(job_file(base, job)))
    space = {"space": {"train.learning_rate": [1e-3, 1e-2]}}
    sweep = sweep_file(base, rows, exact=False, search=space)
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    crowd(monkeypatch, 0.0)
    weights = trained(tmp_path / "jobs.yaml", tmp_path / "alone")
    crowd(monkeypatch, 1.0)
    came = coming_before_the_first_step(monkeypatch)
    assert trained(tmp_path / "jobs.yaml", tmp_path / "crowded") == weights
    assert came == [True]
    tune(load_sweep(tmp_path / "sweep.yaml"), output=tmp_path / "sweep", view=lines())
    assert came == [True, True]


def trained(file: Path, output: Path) -> bytes:
    train(load_spec(file), output=output, progress=ProgressLines(StringIO()))
    return (output / "a" / "adapter" / "adapter_model.safetensors").read_bytes()


def coming_before_the_first_step(monkeypatch) -> list[bool]:
    """Grows as teams come; no run is through its first step before its own have."""
    came: list[bool] = []
    come, on_step = Teams.come, Recorder.on_step
    runs: dict[Recorder, int] = {}

    def noted(self: Teams) -> None:
        come(self)
        came.append(True)

    def held(self: Recorder, *step) -> None:
        enough = runs.setdefault(self, len(runs) + 1)
        wait_until(lambda: len(came) >= enough)
        on_step(self, *step)

    monkeypatch.setattr(Teams, "come", noted)
    monkeypatch.setattr(Recorder, "on_step", held)
    return came
