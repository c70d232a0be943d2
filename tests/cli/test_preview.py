"""`tlora preview` shows what is trained."""

import json

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
