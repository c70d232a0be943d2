"""Files and directories that are replaced whole or not at all."""

import fcntl
import json
import os
import threading
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S

from tlora.core.errors import SpecError
from tlora.runtime import directory
from tlora.runtime.directory import JobResult, RunDirectory, replace_directory, replace_text


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fill_with(text: str):
    return lambda staged: (staged / "file").write_text(text)


def test_a_directory_is_replaced_whole(tmp_path: Path) -> None:
    """Old files are gone, new ones there, nothing else beside it; others may read it."""
    place = tmp_path / "adapter"
    replace_directory(place, lambda staged: (staged / "old").touch())
    replace_directory(place, fill_with("new"))
    assert names(tmp_path) == {"adapter"} and names(place) == {"file"}
    assert (place / "file").read_text() == "new"
    (tmp_path / "plain").mkdir()
    assert place.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("existed", [True, False])
def test_a_filling_that_fails_leaves_what_was_there_and_no_rubbish(
    tmp_path: Path, existed: bool
) -> None:
    """Its error comes through."""
    place = tmp_path / "adapter"
    if existed:
        replace_directory(place, fill_with("old"))

    def fail(staged: Path) -> None:
        (staged / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_directory(place, fail)
    assert names(tmp_path) == ({"adapter"} if existed else set())
    assert not existed or (place / "file").read_text() == "old"


def test_a_move_that_fails_brings_the_old_directory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two renames there is a moment without either."""
    place = tmp_path / "adapter"
    replace_directory(place, fill_with("old"))
    real = os.replace

    def failing(source: Path, target: Path) -> None:
        if Path(source).name == "new":
            raise OSError("no")
        real(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="no"):
        replace_directory(place, fill_with("new"))
    assert names(tmp_path) == {"adapter"} and (place / "file").read_text() == "old"


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rights of any other file, and without a temporary one left behind."""
    file, plain = tmp_path / "run.json", tmp_path / "plain"
    replace_text(file, "old")
    plain.touch()
    assert file.stat().st_mode == plain.stat().st_mode

    def failing(handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="disk full"):
        replace_text(file, "new")
    assert names(tmp_path) == {"run.json", "plain"} and file.read_text() == "old"


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    """Two commands at once would write over each other; when the first has ended, it is free."""
    first, second = RunDirectory(tmp_path / "deep" / "run"), RunDirectory(tmp_path / "deep" / "run")
    first.create(fresh=False)
    who = rf"\(process {os.getpid()} on .+: .+\)"
    with pytest.raises(SpecError, match=rf"another tlora is at work in .*deep/run {who}; wait"):
        second.create(fresh=False)
    first.close()
    second.create(fresh=False)
    second.close()
    assert names(tmp_path / "deep" / "run") == set()


def test_who_only_looks_is_not_taken_for_somebody_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the directory for a moment, however long that is on a busy machine."""
    monkeypatch.setattr(directory, "PATIENCE_S", PATIENCE_S)
    looking = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.2, os.close, [looking]).start()
    run = RunDirectory(tmp_path)
    run.create(fresh=False)
    run.close()


def test_fresh_removes_a_run_and_nothing_else(tmp_path: Path) -> None:
    """A mistyped --output must not cost anybody their files, even beside or inside a run."""
    run = RunDirectory(tmp_path)
    for name in ("run.json", "resolved.yaml", "events.jsonl", "thesis.tex"):
        (tmp_path / name).touch()
    for folder in ("job", "job-with-notes", "photos"):
        (tmp_path / folder).mkdir()
    tracked = ("job/trackers.json", "job/events.out.tfevents.1.host")
    own = ("job/metrics.jsonl", "job-with-notes/result.json", "job-with-notes/notes")
    for path in (*own, *tracked):
        (tmp_path / path).touch()
    (tmp_path / "job" / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "photos" / "cat.png").touch()
    run.create(fresh=True)
    run.close()
    assert names(tmp_path) == {"thesis.tex", "photos", "job-with-notes"}
    assert names(tmp_path / "job-with-notes") == {"notes"}
    assert names(tmp_path / "photos") == {"cat.png"}


class Killed(BaseException):
    """As by SIGKILL: nothing is tidied up."""


@pytest.mark.parametrize("again", [True, False], ids=["fresh again", "plain start"])
@pytest.mark.parametrize("kept", range(1, 7))
def test_a_removal_that_was_cut_off_is_brought_to_its_end(
    kept: int, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever: what is left is no run, and whoever takes the directory next has none of it."""
    written = ("resolved.yaml", "state.sqlite", "a/metrics.jsonl", "a/events.out.tfevents.1.host")
    more = ("a/checkpoints/step-1/file", "b/result.json")
    own = ("thesis.tex", "b/notes")
    for name in ("run.json", *written, *more, *own):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    real = directory.remove

    def remove(path: Path) -> None:
        if path.exists() and sum((tmp_path / name).exists() for name in (*written, *more)) == kept:
            raise Killed
        real(path)

    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(directory, "remove", remove)
        first.create(fresh=True)
    assert not first.is_run
    first.close()
    second.create(fresh=again)
    second.close()
    # A directory that was emptied and not removed is nobody's loss.
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} - {"a"} == {*own, "b"}


def test_a_place_that_cannot_be_used_is_refused_before_anything_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In words: a file there or above it, or a directory that is not this person's."""
    (tmp_path / "run").touch()
    for place in (tmp_path / "run", tmp_path / "run" / "deep"):
        for use in (RunDirectory.take_if_there, lambda run: run.create(fresh=True)):
            with pytest.raises(SpecError, match=r"--output: .*/run is a file"):
                use(RunDirectory(place))
    # Whoever runs this may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    for name in ("", "new", "new/deep"):
        with pytest.raises(SpecError, match="cannot be used: Permission denied"):
            RunDirectory(tmp_path / name).take_if_there()


def test_every_appended_record_is_a_whole_line_at_once(tmp_path: Path) -> None:
    """A reader need not wait for the run to end."""
    run = RunDirectory(tmp_path)
    run.event("attached", job="a")
    run.event("ended", job="ä")
    records = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(r["v"], r["kind"], r["job"]) for r in records] == [
        (1, "attached", "a"),
        (1, "ended", "ä"),
    ]
    assert records[0]["time"] <= records[1]["time"]
    run.close()


def test_a_result_is_written_with_all_its_fields(tmp_path: Path) -> None:
    """In the job's own directory."""
    values = dict.fromkeys(JobResult.__dataclass_fields__, None)
    result = JobResult(**{**values, "job": "a", "status": "completed"})
    RunDirectory(tmp_path).write_result(result)
    written = json.loads((tmp_path / "a" / "result.json").read_text())
    assert written == {"v": 1, **values, "job": "a", "status": "completed"}
