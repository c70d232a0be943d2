"""`tlora report`."""

from pathlib import Path

import pytest
from support.run_dirs import synthetic_run


@pytest.mark.parametrize("unfinished", [[], ["job-001"]])
def test_the_report_of_a_run_is_made_and_its_path_printed(
    tmp_path: Path, tlora_command, capsys, unfinished: list[str]
) -> None:
    """Of a finished one and of one that was killed; an old report is replaced."""
    run = synthetic_run(tmp_path / "run", unfinished=unfinished)
    (run / "report.html").write_text("old")
    assert tlora_command("report", str(run)) == 0
    assert capsys.readouterr().out.split() == [str(run / "report.html")]
    assert "job-001" in (run / "report.html").read_text()


def test_what_is_no_run_is_said_in_words(tmp_path: Path, tlora_command, capsys) -> None:
    """With exit code 2, and the run that was meant where there is one."""
    (tmp_path / "file").write_text("")
    for name, words in (
        ("nowhere", "is not there; name a directory"),
        ("file", "is a file; name a directory"),
        (".", "it holds no run.json\n"),
    ):
        assert tlora_command("report", str(tmp_path / name)) == 2
        assert words in capsys.readouterr().err
    synthetic_run(tmp_path / "run")
    assert tlora_command("report", str(tmp_path)) == 2
    assert f"did you mean {tmp_path / 'run'}?" in capsys.readouterr().err
    (tmp_path / "run" / "run.json").write_text("{")
    assert tlora_command("report", str(tmp_path / "run")) == 2
    assert "run.json: " in capsys.readouterr().err
