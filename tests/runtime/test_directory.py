"""Files and directories that are replaced whole or not at all."""

import json
import os
from pathlib import Path

import pytest

from tlora.core.errors import SpecError
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


def test_a_run_is_not_written_over(tmp_path: Path) -> None:
    """The message names the directory and both ways out."""
    run = RunDirectory(tmp_path / "deep" / "run")
    run.create(fresh=False)
    run.create(fresh=False)
    run.write_json(run.root / "run.json", {})
    with pytest.raises(SpecError, match=r"deep/run holds a run already.*--fresh"):
        run.create(fresh=False)
    assert (run.root / "run.json").exists()


def test_fresh_removes_a_run(tmp_path: Path) -> None:
    """Also one that broke off before `run.json`."""
    for first in ("run.json", "resolved.yaml"):
        run = RunDirectory(tmp_path / "run")
        run.create(fresh=False)
        (run.root / first).touch()
        (run.root / "rest").touch()
        run.create(fresh=True)
        assert names(run.root) == set()


def test_fresh_removes_nothing_that_is_not_a_run(tmp_path: Path) -> None:
    """A mistyped --output must not cost anybody their files."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SpecError, match="holds something that is not a run"):
        RunDirectory(tmp_path).create(fresh=True)
    assert names(tmp_path) == {"thesis.tex"}


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    """In words."""
    (tmp_path / "run").touch()
    with pytest.raises(SpecError, match="run is a file"):
        RunDirectory(tmp_path / "run").create(fresh=True)


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
