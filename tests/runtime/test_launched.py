"""Ranks that a launcher has started again: what is over is seen before anything is loaded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.runs import job_file, write_rows

from tlora.cli.main import main
from tlora.config import dump_spec, load_spec
from tlora.runtime.group import as_rank
from tlora.runtime.group.launched import failed_before


def leave_results(root: Path, **status: str) -> Path:
    for job, each in status.items():
        (root / job).mkdir(parents=True, exist_ok=True)
        (root / job / "result.json").write_text(json.dumps({"v": 1, "job": job, "status": each}))
    return root


def test_failed_jobs_end_a_run_only_if_nothing_is_left(tmp_path: Path) -> None:
    """One without a result, or with half a one, is still to be trained."""
    root = leave_results(tmp_path, one="completed", two="failed", three="paused")
    assert failed_before(root, ["one", "two", "three"]) == ["two", "three"]
    assert failed_before(root, ["one"]) == []
    assert failed_before(root, ["one", "two", "four"]) == []
    (root / "one" / "result.json").write_text('{"v": 1, "sta')
    assert failed_before(root, ["one", "two"]) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_started_again_after_all_jobs_ended_says_what_failed(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Once for all ranks, and with the exit code of the first time on each. A launcher ends all
    with the first that leaves, so the others wait until it is said."""
    data = {"path": str(write_rows(tmp_path / "rows.jsonl", 4))}
    spec = load_spec(
        job_file(tmp_path, {"name": "one", "data": data}, {"name": "two", "data": data})
    )
    (tmp_path / "jobs.yaml").write_text(dump_spec(spec))
    leave_results(tmp_path / "run", one="failed", two="completed")
    waited: list[float] = []
    monkeypatch.setattr("tlora.cli.train.time.sleep", waited.append)
    for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("TORCHELASTIC_RESTART_COUNT", 1)):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "jobs.yaml"), "--output", str(tmp_path / "run")])
    assert ended.value.code == 1
    assert ("failed: one; the reasons are in" in capsys.readouterr().err) == (rank == 0)
    assert len(waited) == rank


class Trained(BaseException):
    """Instead of the rest of the run."""


def test_a_job_that_was_submitted_is_gone_on_with_after_those_of_the_file_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belongs to the run as they do; without it there would be nothing left."""
    data = {"path": str(write_rows(tmp_path / "rows.jsonl", 4))}
    both = load_spec(
        job_file(tmp_path, {"name": "one", "data": data}, {"name": "two", "data": data})
    )
    (tmp_path / "jobs.yaml").write_text(dump_spec(replace(both, jobs=both.jobs[:1])))
    root = leave_results(tmp_path / "run", one="failed")
    (root / "resolved.yaml").write_text(dump_spec(both))
    (root / "run.json").write_text(json.dumps({"submitted": ["two"]}))
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("TORCHELASTIC_RESTART_COUNT", 1)):
        monkeypatch.setenv(name, str(value))

    def trained(run: object, plan: object) -> None:
        raise Trained

    monkeypatch.setattr("tlora.cli.train._Run.with_plan", trained)
    command = ["train", str(tmp_path / "jobs.yaml"), "--output", str(root)]
    with pytest.raises(Trained):
        main(command)
    (root / "run.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(command)


def test_a_rank_that_does_not_speak_leaves_quietly_when_the_group_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """After the one that does."""
    data = {"path": str(write_rows(tmp_path / "rows.jsonl", 4))}
    spec = load_spec(job_file(tmp_path, {"name": "one", "data": data}))
    (tmp_path / "jobs.yaml").write_text(dump_spec(spec))
    (tmp_path / "plan.yaml").write_text("replicas: 2\nbucket: 128\nadapters: rank_local\n")
    for name, value in (("RANK", 1), ("WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))

    def refused(*about, **settings) -> None:
        raise as_rank.RefusedByRank0

    waited: list[float] = []
    monkeypatch.setattr("tlora.cli.train.time.sleep", waited.append)
    monkeypatch.setattr("tlora.runtime.group.choosing.check_memory", lambda *_, **__: None)
    monkeypatch.setattr(as_rank, "train_as_rank", refused)
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "jobs.yaml"), "--plan", str(tmp_path / "plan.yaml")])
    assert ended.value.code == 2 and len(waited) == 1
    assert capsys.readouterr().err == ""


def as_rank_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, logs: Path, *, rank: int, attempt: int
) -> None:
    """What torchrun lays out for its ranks."""
    folder = logs / f"attempt_{attempt}" / str(rank)
    folder.mkdir(parents=True)
    for name, value in (
        ("RANK", rank),
        ("WORLD_SIZE", 2),
        ("TORCHELASTIC_RESTART_COUNT", attempt),
        ("TORCHELASTIC_ERROR_FILE", folder / "error.json"),
    ):
        monkeypatch.setenv(name, str(value))


def refused(*options: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", *options])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("jobs.yaml",), "jobs.yaml: no such file"),
        (("jobs.yaml", "--nowhere"), "No such option"),
    ],
)
def test_a_refusal_is_said_in_the_first_attempt_of_a_launcher_only(
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """Ranks that are started again leave at once with its code, whether they have said it or not.
    Another launcher's ranks say it again."""
    monkeypatch.chdir(tmp_path)
    for launcher in ("first", "second"):
        as_rank_of_torchrun(monkeypatch, tmp_path / launcher, rank=0, attempt=0)
        refused(*options)
        assert message in capsys.readouterr().err
        for rank in (0, 1):
            as_rank_of_torchrun(monkeypatch, tmp_path / launcher, rank=rank, attempt=1)
            refused(*options)
            assert capsys.readouterr().err == ""


def test_of_ranks_that_are_refused_together_one_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A launcher ends all with the first that leaves, so the other waits until it is said."""
    waited: list[float] = []
    monkeypatch.setattr("tlora.cli.app.time.sleep", waited.append)
    said = []
    for rank in (1, 0):
        as_rank_of_torchrun(monkeypatch, tmp_path / "logs", rank=rank, attempt=0)
        refused(str(tmp_path / "jobs.yaml"))
        said.append(capsys.readouterr().err)
    assert "no such file" in said[0] and said[1] == "" and len(waited) == 1


def test_a_refusal_of_a_later_attempt_is_not_held_against_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The first was let in: ranks that it left on another node may still have the directory."""
    for attempt in (1, 2):
        as_rank_of_torchrun(monkeypatch, tmp_path / "logs", rank=0, attempt=attempt)
        refused(str(tmp_path / "jobs.yaml"))
        assert "no such file" in capsys.readouterr().err
