"""Rows are shown as training would take them."""

from support.runs import job_file

import tlora
from tlora.runtime.previewing import preview_job


def test_the_trained_part_is_the_completion_and_its_end(base, rows):
    """Read back from the shown pieces, for two rows of a prompt/completion file."""
    spec = tlora.load_spec(job_file(base, {"name": "only", "data": {"path": str(rows)}}))
    shown = list(preview_job(spec.jobs[0], spec.base, 2))
    assert len(shown) == 2
    first = "".join(text for text, trained in shown[1].pieces if trained)
    assert first.startswith("x2") and "1 and 1 is" not in first
    assert "1 and 1 is" in "".join(text for text, trained in shown[1].pieces if not trained)
    assert f"{rows}:2" in shown[1].title


def test_an_over_long_row_says_what_will_happen_to_it(base, rows):
    """By the job's own policy."""
    job = {"name": "only", "data": {"path": str(rows)}, "train": {"max_length": 5}}
    spec = tlora.load_spec(job_file(base, {**job}), ["train.over_length=drop"])
    (shown,) = preview_job(spec.jobs[0], spec.base, 1)
    assert "over 5: will be left out" in shown.title
