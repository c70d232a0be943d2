"""`tlora preview` shows what is trained."""

import json
import os
import subprocess
import sys

import pytest

from tlora.cli.preview import marked, preview
from tlora.core.errors import SpecError


def test_without_colour_trained_text_stands_between_brackets():
    """Also when it ends the row, and when it comes in several runs."""
    pieces = [("Q: ", False), ("hi", False), ("there", True), ("</s>", True), (" Q2", False)]
    assert marked(pieces, plain=True).plain == "Q: hi[[there</s>]] Q2"
    assert marked([("a", True)], plain=True).plain == "[[a]]"


def test_with_colour_the_text_is_unchanged_and_the_trained_part_styled():
    """Colour and underline: not by colour alone."""
    text = marked([("prompt ", False), ("answer", True)], plain=False)
    assert text.plain == "prompt answer"
    assert [(span.start, span.end, str(span.style)) for span in text.spans] == [
        (7, 13, "green underline")
    ]


def test_several_jobs_may_be_named(tmp_path, capsys):
    """Each is shown, others are not, and the one that is not there is told."""
    rows = [{"prompt": "say", "completion": "so"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    jobs = [{"name": name, "data": {"path": "rows.jsonl"}} for name in ("one", "two", "three")]
    (tmp_path / "jobs.yaml").write_text(json.dumps({"base": {"model": "demo"}, "jobs": jobs}))
    preview(tmp_path / "jobs.yaml", ["three", "one"], rows=1)
    shown = capsys.readouterr().out
    assert "one: " in shown and "three: " in shown and "two: " not in shown
    with pytest.raises(SpecError, match="no job 'tow'"):
        preview(tmp_path / "jobs.yaml", ["one", "tow"], rows=1)


def test_characters_that_the_output_has_not_are_written_as_escapes(tmp_path):
    """A log or a terminal that is not UTF-8 ends no command."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "say", "completion": "caf\u00e9 \\u2603"}')
    job = {"name": "one", "data": {"path": "rows.jsonl"}}
    (tmp_path / "jobs.yaml").write_text(json.dumps({"base": "demo", "jobs": [job]}))
    done = subprocess.run(
        [sys.executable, "-m", "tlora", "preview", str(tmp_path / "jobs.yaml")],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert "caf\u00e9 \\u2603" in done.stdout.decode("latin-1")
