"""Two commands for one sweep: the second reads nothing before it has the directory, and writes over
nothing that the first has left."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from support.sweeps import StopAfter, lines, log_of, sweep_file
from support.tasks import told_once

import tlora
from tlora.core.errors import SpecError
from tlora.core.sweep import SweepSpec
from tlora.runtime.directory import RunDirectory
from tlora.runtime.sweeps import tasks, tune

RUNNER = Path(__file__).parents[2] / "support" / "gated_runner.py"
WORKERS = pytest.param("workers", marks=pytest.mark.multi_process)
MODULES = {"one process": tune, "workers": tasks}


def start(way: str, spec: SweepSpec, output: Path) -> None:
    if way == "workers":
        tasks.tune_on_devices([spec], output=output, devices=2, view=lines())
    else:
        tune.tune(spec, output=output, view=lines())


def is_free(root: Path) -> None:
    directory = RunDirectory(root)
    directory.take()
    directory.close()


@pytest.fixture
def spec(base, rows) -> SweepSpec:
    return tlora.load_sweep(sweep_file(base, rows))


@pytest.mark.multi_process
@pytest.mark.parametrize("way", MODULES)
def test_of_two_at_once_one_goes_on(way, spec, base, rows, tmp_path):
    """The second comes when the first has read the log and before it has written anything: it is
    told who is at work, and nothing is told twice."""
    root, gate = tmp_path / "run", tmp_path / "gate"
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep_file(base, rows)))
    assert tlora.tune(spec, output=root, view=StopAfter(9)).interrupted
    devices = "2" if way == "workers" else "0"
    command = [sys.executable, RUNNER, tmp_path / "sweep.yaml", root, devices]
    first = subprocess.Popen([*command, gate], stdout=subprocess.DEVNULL)
    try:
        while not gate.exists():
            assert first.poll() is None
            time.sleep(0.01)
        second = subprocess.run(command, capture_output=True, text=True)
        gate.unlink()
        assert first.wait() == 0
    finally:
        first.kill()
    assert second.returncode == 1
    assert f"another tlora is at work in {root} (process {first.pid} on " in second.stderr
    told_once(root)


@pytest.mark.parametrize("way", MODULES)
def test_a_sweep_that_began_meanwhile_is_not_written_over(way, spec, swept, tmp_path, monkeypatch):
    """Its directory was not there to be taken."""
    root, load_shape = tmp_path / "run", MODULES[way].load_shape

    def look(base):
        shutil.copytree(swept, root)
        return load_shape(base)

    monkeypatch.setattr(MODULES[way], "load_shape", look)
    with pytest.raises(SpecError, match=r"has begun a run in .* meanwhile; give the same command"):
        start(way, spec, root)
    assert log_of(root) == log_of(swept)
    is_free(root)


@pytest.mark.parametrize("way", ["one process", WORKERS])
def test_a_directory_is_kept_until_the_last_file_is_written(
    way, spec, swept, tmp_path, monkeypatch
):
    """The winner and the report come when all trials are over."""
    root, module = shutil.copytree(swept, tmp_path / "run"), MODULES[way]
    written: list[str] = []

    def during(name: str, real):
        def call(*arguments):
            with pytest.raises(SpecError, match="another tlora is at work"):
                RunDirectory(root).take()
            written.append(name)
            return real(*arguments)

        return call

    for name in ("kept_winner", "write_sweep_report"):
        monkeypatch.setattr(module, name, during(name, getattr(module, name)))
    start(way, spec, root)
    assert written == ["kept_winner", "write_sweep_report"]
    is_free(root)
