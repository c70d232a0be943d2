"""Trackers: one run per job, with the run's own numbers; none of them can hurt a job."""

import io
import json
from pathlib import Path

import pytest
from support.runs import job_file

from tlora.config import load_spec
from tlora.core.errors import SpecError
from tlora.core.job import RunSpec
from tlora.runtime import sinks
from tlora.runtime.progress import ProgressLines
from tlora.runtime.sinks import MlflowSink, Sinks, WandbSink, check_trackers
from tlora.runtime.training import train


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def spec_of(base: Path, rows: Path, *trackers: str) -> RunSpec:
    """One evaluated job, one not."""
    data = {"path": str(rows)}
    return load_spec(
        job_file(
            base,
            {"name": "first", "data": data, "eval": {"split": 4, "steps": 2}},
            {"name": "second", "data": data, "lora": {"r": 4}},
            report_to=list(trackers),
        )
    )


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would draw."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(each.step, each.value) for each in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def logged(path: Path, kind: str) -> list[tuple[int, float]]:
    return [(each["step"], each["loss"]) for each in lines_of(path) if each["kind"] == kind]


def assert_same(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-6)


def test_tensorboard_has_a_run_per_job_with_the_metrics_of_the_files(
    base: Path, rows: Path, tmp_path: Path
) -> None:
    """Losses, learning rate and all, at the same steps."""
    root = tmp_path / "run"
    train(spec_of(base, rows, "tensorboard"), output=root, progress=ProgressLines(io.StringIO()))
    for job in ("first", "second"):
        found = scalars(root / job)
        metrics = root / job / "metrics.jsonl"
        assert_same(found["train/loss"], logged(metrics, "train"))
        assert {"train/lr", "train/grad_norm", "train/tokens_per_s"} <= set(found)
    assert_same(scalars(root / "first")["eval/loss"], logged(root / "first/metrics.jsonl", "eval"))
    assert "eval/loss" not in scalars(root / "second")


def test_tensorboard_forgets_what_a_resumed_job_does_again(tmp_path: Path) -> None:
    """Logged to step 5, gone on from step 3: one curve."""
    for first, steps in ((0, range(1, 6)), (3, range(4, 8))):
        opened = Sinks(["tensorboard"], tmp_path, print)
        opened.open("a", {}, step=first)
        for step in steps:
            opened.log("a", step, "train", {"loss": float(10 * first + step)})
        opened.close_all()
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), *((step, 30.0 + step) for step in range(4, 8))]
    assert scalars(tmp_path / "a")["train/loss"] == expected


def test_wandb_keeps_a_run_per_job_offline(
    base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the job's own folder, under an id that a resumed run finds again."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    root = tmp_path / "run"
    seen = io.StringIO()
    train(spec_of(base, rows, "wandb"), output=root, progress=ProgressLines(seen))
    assert "left out" not in seen.getvalue()
    for job in ("first", "second"):
        known = json.loads((root / job / "trackers.json").read_text())["wandb"]
        [file] = (root / job / "wandb").glob("offline-run-*/*.wandb")
        assert known in file.name and file.stat().st_size > 0
    again = WandbSink(root)
    again.open("first", {}, step=3)
    again.close("first", "completed")
    assert json.loads((root / "first/trackers.json").read_text())["wandb"] == known_id(root)


def known_id(root: Path) -> str:
    [first, *_] = sorted((root / "first" / "wandb").glob("offline-run-*"))
    return first.name.rsplit("-", 1)[1]


def test_mlflow_keeps_a_run_per_job_in_the_run_directory(
    base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the settings as parameters and the loss at every step."""
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy", reason="mlflow-skinny has no store of its own")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    root = tmp_path / "run"
    seen = io.StringIO()
    train(spec_of(base, rows, "mlflow"), output=root, progress=ProgressLines(seen))
    assert "left out" not in seen.getvalue()
    client = MlflowSink(root)._client
    for job, rank in (("first", "2"), ("second", "4")):
        known = json.loads((root / job / "trackers.json").read_text())["mlflow"]
        run = client.get_run(known)
        assert run.info.run_name == job and run.info.status == "FINISHED"
        assert run.data.params["lora.r"] == rank
        found = [(each.step, each.value) for each in client.get_metric_history(known, "train/loss")]
        assert_same(found, logged(root / job / "metrics.jsonl", "train"))


class Broken:
    """A tracker whose server goes away."""

    def __init__(self, root: Path, *, works_for: int = 0) -> None:
        self.works_for = works_for

    def open(self, job: str, settings: sinks.Settings, *, step: int) -> None:
        pass

    def log(self, job: str, step: int, values: object) -> None:
        self.works_for -= 1
        if self.works_for < 0:
            raise ConnectionError("the server went away")

    def close(self, job: str, status: str) -> None:
        raise AssertionError("it was left out")


def test_a_tracker_that_breaks_is_left_out_and_the_jobs_go_on(
    base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said once; the other tracker has everything."""
    broken = {**sinks.SINKS, "mlflow": lambda root: Broken(root, works_for=2)}
    monkeypatch.setattr(sinks, "SINKS", broken)
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: object())
    root = tmp_path / "run"
    seen = io.StringIO()
    spec = spec_of(base, rows, "mlflow", "tensorboard")
    assert train(spec, output=root, progress=ProgressLines(seen)).failed == []
    assert seen.getvalue().count("report_to: mlflow gave up") == 1
    assert "the server went away" in seen.getvalue()
    assert_same(
        scalars(root / "second")["train/loss"], logged(root / "second/metrics.jsonl", "train")
    )


def test_a_tracker_that_is_not_installed_is_bad_input(
    base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded or written, with the field and the remedy."""
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SpecError, match=r"report_to.*wandb is not installed.*tlora\[track\]"):
        train(spec_of(base, rows, "wandb"), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    check_trackers(())


def test_only_finite_numbers_are_handed_on(tmp_path: Path) -> None:
    """A NaN would spoil a tracker's axis; None is what an evaluation has for a learning rate."""
    opened = Sinks(["tensorboard"], tmp_path, print)
    opened.open("a", {}, step=0)
    opened.log("a", 1, "train", {"loss": float("nan"), "lr": None, "grad_norm": 2.0})
    opened.close("a", "failed")
    opened.close("a", "failed")
    assert scalars(tmp_path / "a") == {"train/grad_norm": [(1, 2.0)]}
