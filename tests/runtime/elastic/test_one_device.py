"""Jobs join and leave a run of one process, and everybody trains as alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.arriving import rows_were_waiting
from support.asking import Asking, answers, put, submission
from support.kills import adapter_bytes, curves, same_end
from support.runs import job_file

import tlora
from tlora.core.job import RunSpec
from tlora.runtime.elastic.one_device import OneDevice
from tlora.runtime.progress import ProgressLines

STEPS = 16
JOBS = ("plain", "wide", "late")


@pytest.fixture(scope="module")
def spec(base: Path, rows: Path) -> RunSpec:
    """Three jobs that differ, to the bit the same in any company."""
    data = {"path": str(rows)}
    evaluated = {"split": 4, "steps": 5}
    jobs = [
        {"name": "plain", "data": data, "lora": {"lora_dropout": 0.2}, "eval": evaluated},
        {"name": "wide", "data": data, "lora": {"r": 8}, "train": {"batch_size": 5}},
        {"name": "late", "data": data, "train": {"seed": 3}},
    ]
    engine = {"device": "cpu", "isolation": "exact", "nano_batch_tokens": 128}
    steps = [f"train.max_steps={STEPS}", "jobs.late.train.max_steps=20", "save.steps=3"]
    return tlora.load_spec(job_file(base, *jobs, engine=engine), steps)


def first(spec: RunSpec) -> RunSpec:
    return replace(spec, jobs=spec.jobs[:2])


def later(spec: RunSpec) -> RunSpec:
    return replace(spec, jobs=spec.jobs[2:])


@pytest.fixture(scope="module")
def together(spec: RunSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same jobs, none of them disturbed."""
    output = tmp_path_factory.mktemp("together") / "run"
    assert not tlora.train(spec, output=output).failed
    return output


def test_a_submitted_job_trains_as_alone_and_is_kept(
    spec: RunSpec, together: Path, tmp_path: Path
) -> None:
    """It comes at a neighbour's fifth step: its bits and theirs are those of an undisturbed run.
    The record has it as if it had been in the file, and the report shows it."""
    output = tmp_path / "run"
    view = Asking(output, {("plain", 5): [("submit", "", submission(later(spec)))]})
    result = tlora.train(first(spec), output=output, progress=view)
    assert {name: job.status for name, job in result.jobs.items()} == dict.fromkeys(
        JOBS, "completed"
    )
    for job in JOBS:
        assert same_end(output, together, job)
    assert answers(output) == ["at work: late"]
    about = json.loads((output / "run.json").read_text())
    assert about["jobs"] == list(JOBS) and about["submitted"] == ["late"]
    assert "late: joins, 20 steps to go" in view.out.getvalue()  # type: ignore[attr-defined]
    assert "late" in (output / "report.html").read_text()
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    assert [each["job"] for each in events if each["kind"] == "joined"] == ["late"]


@pytest.mark.parametrize("answered", [False, True])
def test_a_run_that_was_killed_goes_on_with_what_was_submitted(
    spec: RunSpec,
    together: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answered: bool,
) -> None:
    """The same command with the same file; whether the end came before the answer or after."""
    output = tmp_path / "run"

    class Killed(BaseException):
        """As SIGKILL: nothing is saved on the way out."""

    def kill(*_, **__) -> None:
        raise Killed

    view = Asking(output, {("plain", 5): [("submit", "", submission(later(spec)))]})
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(view, "join", kill) if answered else patch.setattr(OneDevice, "admit", kill)
        tlora.train(first(spec), output=output, progress=view)
    assert answers(output) == ["at work: late" if answered else None]
    result = tlora.train(first(spec), output=output, progress=ProgressLines())
    assert set(result.jobs) == set(JOBS) and not result.failed
    assert answers(output) == ["at work: late"]
    for job in JOBS:
        assert same_end(output, together, job)
    assert set(tlora.train(first(spec), output=output).jobs) == set(JOBS)


def test_a_cancelled_job_leaves_its_adapter_and_its_neighbours_alone(
    spec: RunSpec, together: Path, tmp_path: Path
) -> None:
    """Their bits are those of an undisturbed run. The same command leaves it as it is; asked to, it
    goes on from there to the end that it would have had."""
    output = tmp_path / "run"
    view = Asking(output, {("wide", 4): [("cancel", "plain", {})]})
    result = tlora.train(spec, output=output, progress=view)
    left = result.jobs["plain"]
    assert (left.status, left.reason) == ("cancelled", "a person cancelled it")
    assert 0 < left.steps < STEPS and left.adapter == "plain/adapter"
    assert adapter_bytes(output, "plain") != adapter_bytes(together, "plain")
    assert not result.failed
    for job in ("wide", "late"):
        assert same_end(output, together, job)
    kept = adapter_bytes(output, "plain")
    assert tlora.train(spec, output=output).jobs["plain"].status == "cancelled"
    assert adapter_bytes(output, "plain") == kept
    put(output, ("resume", "plain", {}), ("cancel", "wide", {}), ("resume", "nobody", {}))
    result = tlora.train(spec, output=output)
    assert result.jobs["plain"].status == "completed"
    assert same_end(output, together, "plain")
    assert answers(output) == [
        f"cancelled after {left.steps} steps; its adapter is kept",
        f"goes on after step {left.steps}",
        "error: wide is over: completed",
        f"error: {output} has no job 'nobody'",
    ]


def test_a_job_comes_leaves_and_comes_back_in_one_run(
    spec: RunSpec, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out between two of its batches' nano-batches, in again from there; both times into rows that
    were found before."""
    waiting = rows_were_waiting(monkeypatch)
    output = tmp_path / "run"
    asked = {
        ("plain", 3): [("submit", "", submission(later(spec)))],
        ("late", 5): [("cancel", "late", {})],
        ("plain", 12): [("resume", "late", {})],
    }
    result = tlora.train(first(spec), output=output, progress=Asking(output, asked))
    assert {job.status for job in result.jobs.values()} == {"completed"}
    for job in JOBS:
        assert same_end(output, together, job)
    steps = [each[1] for each in curves(output, "late") if each[0] == "train"]
    assert steps == list(range(1, 21))
    # Not for those that were there from the start, nor for adapters that are exported.
    assert waiting.count(True) == 2


def test_what_cannot_join_is_answered_and_disturbs_nobody(
    spec: RunSpec, together: Path, tmp_path: Path, rows: Path
) -> None:
    """Another base, a name that is taken, data that are gone, a rank whose bits nobody looked
    at."""
    output = tmp_path / "run"
    own = tmp_path / "own.jsonl"
    own.write_bytes(rows.read_bytes())
    (late,) = later(spec).jobs
    gone = submission(replace(spec, jobs=(replace(late, data=replace(late.data, path=str(own))),)))
    own.unlink()
    taken = replace(late, name="wide")
    unseen = replace(late, name="unseen", lora=replace(late.lora, r=3))
    other = submission(later(spec))
    other["base"]["dtype"] = "bfloat16"
    asked = {
        ("plain", 3): [
            ("submit", "", other),
            ("submit", "", submission(replace(spec, jobs=(taken,)))),
            ("submit", "", gone),
            ("submit", "", submission(replace(spec, jobs=(unseen,)))),
            ("paint", "wide", {}),
        ]
    }
    result = tlora.train(first(spec), output=output, progress=Asking(output, asked))
    assert set(result.jobs) == {"plain", "wide"} and not result.failed
    for words, answer in zip(
        (
            "error: base.dtype: is bfloat16",
            "error: job 'wide': lora.r: differs from the job of this name",
            "error: job 'late': data.path",
            "error: job 'unseen': lora.r: is 3; exact isolation was shown for 2, 8",
            "error: 'paint' is nothing that a run can be asked",
        ),
        answers(output),
        strict=True,
    ):
        assert words in (answer or "")
    for job in ("plain", "wide"):
        assert same_end(output, together, job)
