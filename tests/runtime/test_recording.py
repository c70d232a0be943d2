"""Files are written while training goes on: who reads them or is told of them sees no
difference."""

import io
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.kills import adapter_bytes, curves
from support.runs import job_file
from support.transfers import SlowLink
from support.waiting import PATIENCE_S

import tlora
from tlora.model import adapter_rows
from tlora.model.snapshot import InBackground
from tlora.runtime import exporting, saving
from tlora.runtime.directory import RunDirectory
from tlora.runtime.progress import ProgressLines
from tlora.runtime.recording import Recorder
from tlora.runtime.resuming import Resumption
from tlora.runtime.sinks import Sinks
from tlora.runtime.writing import Writer
from tlora.training.checkpoint import checkpoints, load_checkpoint
from tlora.training.engine import Engine

STEPS = 12


def spec_of(base: Path, rows: Path, **first: object) -> tlora.RunSpec:
    """A short job that is evaluated, and a long one; one job to a nano-batch."""
    data = {"path": str(rows)}
    short = {"name": "short", "data": data, "eval": {"split": 4, "steps": 2}, **first}
    file = job_file(base, short, {"name": "long", "data": data, "lora": {"r": 8}})
    file["defaults"]["save"] = {"steps": 2, "total_limit": None}
    file["engine"] = {"device": "cpu", "isolation": "exact", "nano_batch_tokens": 128}
    spec = tlora.load_spec(file)
    short, long = spec.jobs
    steps = {short.name: 4, long.name: STEPS}
    jobs = [
        replace(job, train=replace(job.train, max_steps=steps[job.name])) for job in (short, long)
    ]
    return replace(spec, jobs=tuple(jobs))


class Watched(ProgressLines):
    """Notes what was there when things were told."""

    def __init__(self) -> None:
        super().__init__(out=io.StringIO())
        self.ends: list[str] = []
        self.steps: list[tuple[str, int]] = []
        self.on_disk: dict[str, bool] = {}
        self.steps_at_end: dict[str, int] = {}
        self.root: Path | None = None

    def on_step(self, driver, done) -> None:
        self.steps.append((done.job, done.step))

    def on_end(self, result) -> None:
        super().on_end(result)
        self.ends.append(result.job)
        assert self.root is not None
        self.on_disk[result.job] = (self.root / result.job / "adapter").is_dir() and (
            self.root / result.job / "result.json"
        ).is_file()
        self.steps_at_end[result.job] = sum(job == "long" for job, _ in self.steps)


def train(spec: tlora.RunSpec, output: Path, progress: Watched | None = None):
    progress = progress or Watched()
    progress.root = output
    return tlora.train(spec, output=output, progress=progress), progress


def write_every_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the disk is."""
    monkeypatch.setattr(Writer, "_drop", lambda self, job: None)


@pytest.fixture(scope="module")
def undisturbed(base, rows, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        write_every_checkpoint(patch)
        result, progress = train(spec_of(base, rows), output)
    assert not result.failed and all(progress.on_disk.values())
    return output


def files(output: Path) -> dict[str, bytes]:
    """The tensors of all adapters and checkpoints."""
    kept = output.glob("*/**/*.safetensors")
    return {str(path.relative_to(output)): path.read_bytes() for path in kept}


def same_files(output: Path, other: Path) -> bool:
    """Byte for byte."""
    found, expected = files(output), files(other)
    assert found.keys() == expected.keys() and len(found) > 10
    return found == expected


def slow_courier(monkeypatch: pytest.MonkeyPatch, broken: bool = False) -> None:
    """Snapshots that arrive when some steps more have been taken, if nobody waits for them, through
    small buffers; broken ones do not copy on the device first."""
    on_step, taken = Watched.on_step, [0]

    def count(self, driver, done) -> None:
        on_step(self, driver, done)
        taken[0] += 1

    def late(device) -> InBackground:
        link = SlowLink(staging=1_001)
        link.mark = mark
        courier = InBackground(link, slab_bytes=10_000)
        if broken:
            courier._cloned = lambda sources: [[source] for source in sources]  # type: ignore
        return courier

    def mark() -> Callable[[], None]:
        before = taken[0]

        def wait() -> None:
            # At the end of a job, or where there is no room for more, training waits.
            end = time.monotonic() + 0.5
            while taken[0] < before + 2 and time.monotonic() < end:
                time.sleep(0.001)

        return wait

    monkeypatch.setattr(Watched, "on_step", count)
    monkeypatch.setattr(adapter_rows, "courier_for", late)


def test_files_hold_what_they_would_if_training_had_waited(
    base, rows, tmp_path, undisturbed, monkeypatch
) -> None:
    """Jobs have gone on by the time a snapshot arrives: checkpoints, best and last adapters are the
    same bits; without the copy on the device they are not."""
    write_every_checkpoint(monkeypatch)
    slow_courier(monkeypatch)
    result, _ = train(spec_of(base, rows), tmp_path / "run")
    assert not result.failed
    assert same_files(tmp_path / "run", undisturbed)
    for job in ("short", "long"):
        assert curves(tmp_path / "run", job) == curves(undisturbed, job)
    slow_courier(monkeypatch, broken=True)
    train(spec_of(base, rows), tmp_path / "broken")
    assert not same_files(tmp_path / "broken", undisturbed)


class Gate:
    """Adapters of one job are not written before it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.open = threading.Event()
        replace_directory = exporting.replace_directory

        def waits(path: Path, fill) -> None:
            if path.parts[-2:] == ("short", name):
                assert self.open.wait(PATIENCE_S)
            replace_directory(path, fill)

        monkeypatch.setattr(exporting, "replace_directory", waits)


class Opens(Watched):
    """Opens a gate when a job has taken so many steps."""

    def __init__(self, gate: Gate, job: str, step: int) -> None:
        super().__init__()
        self.gate, self.at = gate, (job, step)

    def on_step(self, driver, done) -> None:
        super().on_step(driver, done)
        if (done.job, done.step) == self.at:
            self.gate.open.set()


@pytest.mark.parametrize("name", ["adapter", "best"])
def test_neighbours_train_while_a_job_is_written(
    base, rows, tmp_path, undisturbed, monkeypatch, name
) -> None:
    """The file waits for a step of the neighbour; the job's end is told after it is there, and in
    the results before its neighbour's."""
    spec = spec_of(base, rows)
    progress = Opens(Gate(monkeypatch, name), "long", STEPS - 2)
    result, _ = train(spec, tmp_path / "run", progress)
    assert progress.gate.open.is_set() and not result.failed
    assert progress.ends == ["short", "long"] == list(result.jobs)
    assert progress.on_disk == {"short": True, "long": True}
    assert progress.steps_at_end["short"] >= STEPS - 2
    assert adapter_bytes(tmp_path / "run", "short") == adapter_bytes(undisturbed, "short")
    said = progress.out.getvalue()  # type: ignore[attr-defined]
    assert "short: completed after 4 steps" in said


def test_the_time_of_a_job_is_not_that_of_its_files(base, rows, tmp_path, monkeypatch) -> None:
    """`seconds` is when it was through."""
    spec = spec_of(base, rows)
    result, _ = train(
        spec, tmp_path / "run", Opens(Gate(monkeypatch, "adapter"), "long", STEPS - 1)
    )
    assert result.jobs["short"].seconds < result.jobs["long"].seconds


def full_disk(monkeypatch: pytest.MonkeyPatch, name: str, after: int = 0) -> None:
    """Under one file of the short job, from some writes on."""
    replace_directory, written = exporting.replace_directory, []

    def full(path: Path, fill) -> None:
        if path.parts[-2:] == ("short", name):
            written.append(path)
            if len(written) > after:
                raise OSError(28, "No space left on device")
        replace_directory(path, fill)

    monkeypatch.setattr(exporting, "replace_directory", full)


@pytest.mark.parametrize("after", [0, 1])
def test_a_best_adapter_that_cannot_be_written_fails_its_job_only(
    base, rows, tmp_path, undisturbed, monkeypatch, after
) -> None:
    """With the reason, and without an adapter: not a copy of an older best either."""
    full_disk(monkeypatch, "best", after)
    result, _ = train(spec_of(base, rows), tmp_path / "run")
    assert result.failed == ["short"]
    assert "No space left" in result.jobs["short"].reason
    assert result.jobs["short"].adapter is None
    assert not (tmp_path / "run/short/adapter").exists()
    assert (tmp_path / "run/short/best").exists() == bool(after)
    assert json.loads((tmp_path / "run/short/result.json").read_text())["status"] == "failed"
    assert adapter_bytes(tmp_path / "run", "long") == adapter_bytes(undisturbed, "long")
    monkeypatch.undo()
    assert not train(spec_of(base, rows), tmp_path / "run")[0].failed
    assert adapter_bytes(tmp_path / "run", "short") == adapter_bytes(undisturbed, "short")


class Breaks(Opens):
    """A view with a mistake, while a file still waits."""

    def on_step(self, driver, done) -> None:
        super().on_step(driver, done)
        if (done.job, done.step) == self.at:
            raise RuntimeError("a mistake in the view")


def test_what_was_handed_over_is_written_when_the_loop_breaks(
    base, rows, tmp_path, undisturbed, monkeypatch
) -> None:
    """The job that was through has its adapter and its result; the other goes on from where it
    was."""
    spec = spec_of(base, rows)
    progress = Breaks(Gate(monkeypatch, "adapter"), "long", STEPS - 2)
    with pytest.raises(RuntimeError, match="a mistake in the view"):
        train(spec, tmp_path / "run", progress)
    assert progress.ends == ["short"] and progress.on_disk["short"]
    names = [path.name for path in checkpoints(tmp_path / "run/long/checkpoints")]
    assert names[-1] == f"step-{STEPS - 2:08d}"
    assert not train(spec, tmp_path / "run")[0].failed
    for job in ("short", "long"):
        assert adapter_bytes(tmp_path / "run", job) == adapter_bytes(undisturbed, job)


def test_memory_that_runs_out_while_saving_is_a_failed_save(
    base, rows, tmp_path, monkeypatch
) -> None:
    """The job pauses with that reason, the other completes. A disk so slow that the job is through
    before it is told would not matter."""
    monkeypatch.setattr(saving.Saver, "settle", saving.Saver.flush)
    save = saving.save_checkpoint

    def lost(parent: Path, job: str, checkpoint):
        if job == "long":
            raise MemoryError("none left")
        return save(parent, job, checkpoint)

    monkeypatch.setattr(saving, "save_checkpoint", lost)
    result, _ = train(spec_of(base, rows), tmp_path / "run")
    assert result.jobs["long"].status == "paused"
    assert "cannot save a checkpoint" in result.jobs["long"].reason
    assert "none left" in result.jobs["long"].reason
    assert result.jobs["short"].status == "completed"


def test_no_checkpoint_knows_of_a_best_adapter_that_is_not_there(
    base, rows, tmp_path, monkeypatch
) -> None:
    """The best one is lost on a full disk and the checkpoints after it would fit: the job goes on
    from before, and its best adapter is there in the end."""
    spec = spec_of(base, rows)
    short, long = spec.jobs
    slow_to_learn = replace(short.train, max_steps=8)
    short = replace(short, train=slow_to_learn, save=replace(short.save, steps=1))
    spec = replace(spec, jobs=(short, long))
    full_disk(monkeypatch, "best")
    result, _ = train(spec, tmp_path / "run")
    assert result.failed == ["short"]
    for path in checkpoints(tmp_path / "run/short/checkpoints"):
        assert load_checkpoint(path).progress["best"] is None, path
    monkeypatch.undo()
    result, _ = train(spec, tmp_path / "run")
    assert result.jobs["short"].best_adapter == "short/best"


def test_a_job_of_which_a_line_is_missing_is_not_saved(base, rows, tmp_path, monkeypatch) -> None:
    """The loop breaks while a step is recorded, and the next one, which was under way, is recorded
    in full: the job goes on from before both, and nothing is missing in its metrics."""
    engine_init, log = Engine.__init__, Sinks.log
    broken = []

    def runs_ahead(self, *args, **settings) -> None:
        engine_init(self, *args, **settings, ahead=1)

    def breaks(self, job, step, *rest) -> None:
        if (job, step) == ("long", 5) and not broken:
            broken.append(step)
            raise RuntimeError("a mistake in a tracker")
        log(self, job, step, *rest)

    monkeypatch.setattr(Engine, "__init__", runs_ahead)
    monkeypatch.setattr(Sinks, "log", breaks)
    output = tmp_path / "run"
    with pytest.raises(RuntimeError, match="a mistake in a tracker"):
        train(spec_of(base, rows), output)
    names = [path.name for path in checkpoints(output / "long/checkpoints")]
    assert names[-1] == "step-00000004"
    assert not train(spec_of(base, rows), output)[0].failed
    steps = [line[1] for line in curves(output, "long") if line[0] == "train"]
    assert steps == list(range(1, STEPS + 1))


def test_a_job_that_begins_again_has_its_metrics_in_the_file(tmp_path) -> None:
    """In a process that has written some: they are cut off, and the next ones are not lost."""
    directory = RunDirectory(tmp_path)
    recorder = Recorder.__new__(Recorder)
    recorder.directory, recorder.results = directory, []
    recorder._unrecorded, recorder._resumed = set(), []
    recorder._saver = SimpleNamespace(forget=lambda job: None)  # type: ignore[assignment]
    metrics = directory.job("a") / "metrics.jsonl"
    directory.append(metrics, {"step": 9})
    driver: Any = SimpleNamespace(name="a")
    recorder.resume(driver, Resumption())
    assert metrics.read_text() == ""
    directory.append(metrics, {"step": 1})
    assert json.loads(metrics.read_text()) == {"step": 1}
