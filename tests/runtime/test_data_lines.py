"""What is said of the data before training: much for a few jobs, little for many."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tlora.core.job import DataSpec, EvalSpec, JobSpec
from tlora.data.prepare import PreparedData
from tlora.data.report import DataReport, LengthQuantiles
from tlora.runtime.data_lines import FEW_JOBS, MOST_LINES, full_lines, idle_settings, start_lines

WHOLE = Path("runs/x/data.txt")
REPORT = DataReport(
    detected="chat (keys messages)",
    rendering="chat template",
    rows_read=1200,
    rows_dropped=0,
    rows_truncated=0,
    max_length=64,
    train_rows=1000,
    train_tokens=20_000,
    train_targets=5_000,
    eval_rows=200,
    lengths=LengthQuantiles.of(np.array([10, 20, 30])),
    from_cache=False,
)


def job_on(name: str, path: str, **evaluation: object) -> JobSpec:
    return JobSpec(
        name=name, data=DataSpec(path=path), eval=EvalSpec(**{"split": 200, **evaluation})
    )


def data_of(jobs: list[JobSpec], report: DataReport = REPORT) -> dict[str, PreparedData]:
    """Views are not looked at: the report has all that is said."""
    return {job.name: PreparedData(None, None, report, key=str(job.data.path)) for job in jobs}  # pyright: ignore[reportArgumentType]


def test_a_few_jobs_are_described_in_full() -> None:
    """Every line of every report, under the job's name."""
    jobs = [job_on(f"job-{at}", f"{at}.jsonl") for at in range(FEW_JOBS)]
    data = data_of(jobs)
    assert start_lines(jobs, data, WHOLE) == full_lines(data)
    assert full_lines(data)[0].startswith("job-0: 1,200 rows of chat")


def test_jobs_that_share_a_dataset_are_said_once() -> None:
    """With how many they are; a job with data of its own goes by its name."""
    jobs = [job_on(f"job-{at}", "data/shared.jsonl") for at in range(40)]
    jobs.append(job_on("own", "data/own.jsonl"))
    head, shared, own = start_lines(jobs, data_of(jobs), WHOLE)
    assert head == ("2 datasets of 41 jobs (tokens: median to longest), in full in runs/x/data.txt")
    facts = "1,200 rows, 20-30 tokens, 25% trained, 200 held out"
    assert shared == f"  40 jobs  shared.jsonl  {facts}"
    assert own == f"  own      own.jsonl     {facts}"


def test_many_datasets_end_in_a_count() -> None:
    """And no line gets much wider than a terminal, however long the names."""
    jobs = [job_on(f"a-very-long-name-of-a-job-{at}", f"{at}-{'x' * 80}") for at in range(100)]
    lines = start_lines(jobs, data_of(jobs), WHOLE)
    assert len(lines) == MOST_LINES + 2
    assert lines[-1] == f"  and {100 - MOST_LINES} more datasets"
    assert max(map(len, lines)) <= 100


def test_rows_that_were_cut_or_left_out_are_not_passed_over() -> None:
    """Nor those with an empty answer. As a range, where jobs that share the file have other
    limits."""
    jobs = [job_on(f"job-{at}", "rows.jsonl") for at in range(6)]
    data = data_of(jobs)
    data["job-1"] = PreparedData(
        None,  # pyright: ignore[reportArgumentType]
        None,
        replace(REPORT, rows_truncated=7, rows_dropped=2, rows_empty=5, eval_rows=100),
        key="rows.jsonl",
    )
    line = start_lines(jobs, data, WHOLE)[1]
    assert line.endswith(
        "100-200 held out, 0-7 cut, 0-2 left out as too long, 0-5 with an empty answer"
    )


@pytest.mark.parametrize("jobs", [2, 30])
def test_evaluations_that_cannot_be_are_told(jobs: int) -> None:
    """In one line for all the jobs they concern; jobs that can be evaluated are not named."""
    without = [job_on(f"bare-{at}", "r.jsonl", split=0, steps=5) for at in range(jobs)]
    with_rows = job_on("whole", "r.jsonl", steps=5)
    (line,) = idle_settings([with_rows, *without])
    assert line.startswith("bare-0, bare-1") and "whole" not in line
    assert ("and 27 more" in line) == (jobs == 30)
    assert "no rows are held out, so eval.steps does nothing" in line
    assert idle_settings([with_rows, job_on("silent", "r.jsonl", split=0)]) == []
    assert line in start_lines(without, data_of(without), WHOLE)
