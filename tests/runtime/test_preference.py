"""Preference jobs from a job file to adapters, metrics and the report, stopped and gone on with."""

import io
import json
import os
import signal
from pathlib import Path

import pytest
from support.kills import adapter_bytes, curves
from support.runs import job_file

import tlora
from tlora.runtime.checking import check_run
from tlora.runtime.previewing import preview_job
from tlora.runtime.progress import ProgressLines

STEPS = 12


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = (
        {"prompt": f"{i} and {i % 7} is ", "chosen": f"{'x' * (i % 5)}{i}", "rejected": f"no {i}"}
        for i in range(20)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def spec_of(base: Path, rows: Path, pairs: Path, *overrides: str):
    file = job_file(
        base,
        {
            "name": "taste",
            "data": {"path": str(pairs)},
            "train": {"loss": "dpo", "beta": 0.5, "batch_size": 3},
            "lora": {"lora_dropout": 0.1},
            "eval": {"split": 4},
        },
        {"name": "plain", "data": {"path": str(rows)}, "eval": {"split": 4}},
    )
    file["defaults"]["train"]["max_steps"] = STEPS
    file["defaults"]["save"] = {"steps": 3}
    file["defaults"]["eval"] = {"steps": 5}
    file["engine"] = {"device": "cpu", "isolation": "exact", "nano_batch_tokens": 128}
    return tlora.load_spec(file, overrides)


class StopAfter(ProgressLines):
    """A person who presses Ctrl-C after some nano-batches."""

    def __init__(self, nano_batches: int) -> None:
        super().__init__(out=io.StringIO())
        self.left = nano_batches

    def on_nano_batch(self, outcome) -> None:
        super().on_nano_batch(outcome)
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def undisturbed(base, rows, pairs, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    assert not tlora.train(spec_of(base, rows, pairs), output=output).failed
    return output


def metrics(output: Path, job: str, kind: str) -> list[dict]:
    lines = (output / job / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def test_metrics_and_report_tell_of_the_pairs(undisturbed):
    """In training and held out; the supervised job's lines have nothing more than before."""
    for kind, count in (("train", STEPS), ("eval", 4)):
        found = metrics(undisturbed, "taste", kind)
        assert len(found) == count
        for record in found:
            gap = record["chosen_reward"] - record["rejected_reward"]
            assert record["margin"] == pytest.approx(gap)
            assert 0 <= record["accuracy"] <= 1
        assert "accuracy" not in metrics(undisturbed, "plain", kind)[0]
    assert metrics(undisturbed, "taste", "train")[-1]["margin"] > 0
    report = (undisturbed / "report.html").read_text()
    assert "<h2>Preferences</h2>" in report and "held out" in report


def test_a_preference_job_that_is_stopped_goes_on_to_the_same_end(
    base, rows, pairs, tmp_path, undisturbed
):
    """Stopped in a pass for references, in the first epoch and in a later one; curves, figures and
    adapters are those of the undisturbed run to the bit."""
    output = tmp_path / "run"
    for nano_batches in (3, 7, 12):
        result = tlora.train(
            spec_of(base, rows, pairs), output=output, progress=StopAfter(nano_batches)
        )
        assert result.interrupted
    assert not tlora.train(spec_of(base, rows, pairs), output=output).failed
    for job in ("taste", "plain"):
        assert curves(output, job) == curves(undisturbed, job)
        assert adapter_bytes(output, job) == adapter_bytes(undisturbed, job)
    for kind in ("train", "eval"):
        found, expected = (
            [record["margin"] for record in metrics(each, "taste", kind)]
            for each in (output, undisturbed)
        )
        assert found == expected


def test_check_and_preview_show_pairs(base, rows, pairs):
    spec = spec_of(base, rows, pairs, "jobs.taste.train.label_smoothing=0.1")
    text = "\n".join(check_run(spec))
    expected = "dpo on preference pairs: beta 0.5, label smoothing 0.1, the base as the reference"
    assert expected in text
    assert "20 pairs of preference (keys prompt, chosen, rejected)" in text
    titles = [shown.title for shown in preview_job(spec.jobs[0], spec.base, 1)]
    assert [title.split(" (")[0] for title in titles] == [
        f"taste: {pairs}:1 chosen",
        f"taste: {pairs}:1 rejected",
    ]


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("jobs.taste.train.loss=token_mean", "train.loss: token_mean cannot train on preference"),
        ("jobs.plain.train.loss=dpo", "job 'plain': train.loss: dpo trains on preference pairs"),
        ("jobs.taste.train.loss_type=ipo", "train.loss_type: must be 'sigmoid', got 'ipo'"),
        ("jobs.taste.train.loss=kto", "must be one of token_mean, sum, dpo, got 'kto'"),
        ("jobs.taste.train.beta=-1", "job 'taste': train.beta: must be positive, got -1"),
        ("jobs.taste.data.columns={chosen: best}", "data.columns maps chosen to 'best'"),
        ("engine.nano_batch_tokens=8", "set engine.nano_batch_tokens to at least"),
    ],
)
def test_what_is_wrong_is_told_by_job_and_field(override, complaint, base, rows, pairs, tmp_path):
    with pytest.raises(ValueError) as caught:
        tlora.train(spec_of(base, rows, pairs, override), output=tmp_path / "run")
    assert complaint in str(caught.value)
