"""`tlora tune` and its companions, through the real command line."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from support.models import save_base
from support.runs import quiet_single_thread, write_rows

from tlora.store.study import StudyLog


@pytest.fixture(scope="module", autouse=True)
def single_thread() -> Iterator[None]:
    yield from quiet_single_thread()


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """`sweep.yaml` of four short trials, in the current directory."""
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    save_base(tmp_path / "base")
    write_rows(tmp_path / "rows.jsonl", 20)
    file = {
        "base": {"model": "base"},
        "engine": {"device": "cpu", "nano_batch_tokens": 128},
        "defaults": {"train": {"max_steps": 6, "batch_size": 2}, "eval": {"split": 4, "steps": 2}},
        "task": {"name": "t", "data": "rows.jsonl"},
        "search": {"space": {"lora.r": [2, 4], "lr": [1e-4, 1e-2]}},
    }
    write(file)
    return file


def write(file: dict) -> None:
    Path("sweep.yaml").write_text(yaml.safe_dump(file))


def test_a_sweep_from_file_to_winner_and_on(sweep, tlora_command, capsys):
    """It runs, is reported, and a trial that was given up goes on by hand when it runs again."""
    assert tlora_command("tune", "sweep.yaml", "--json", "study.json") == 0
    said = capsys.readouterr().out
    for words in (
        "4 trials, early exit: alto",
        "winner:",
        "alone:   tlora train runs/sweep/winner",
    ):
        assert words in said
    study = json.loads(Path("study.json").read_text())
    assert study["kind"] == "study" and study["saved_fraction"] > 0.3
    assert Path("runs/sweep/winner/adapter/adapter_config.json").is_file()
    assert "Leaderboard" in Path("runs/sweep/report.html").read_text()

    gone = next(each["name"] for each in study["trials"] if each["status"] == "exited")
    assert tlora_command("resume", gone, "--run", "runs/sweep") == 0
    assert tlora_command("clone", gone, "--run", "runs/sweep", "-o", "train.lr=0.02") == 0
    assert "noted" in capsys.readouterr().out
    assert tlora_command("tune", "sweep.yaml") == 0
    assert tlora_command("status", "--run", "runs/sweep") == 0
    said = capsys.readouterr().out
    assert f"{gone}.1" in said and "train.learning_rate=0.02" in said
    again = json.loads(Path("runs/sweep/study.json").read_text())
    found = {each["name"]: each["status"] for each in again["trials"]}
    assert found[gone] == "completed" == found[f"{gone}.1"]
    assert tlora_command("report", "runs/sweep") == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"search": {"space": {}}}, "search.space: is empty"),
        ({"search": {"space": {"lora.r": [0, 2]}}}, "job 't-00': lora.r: must be at least 1"),
        ({"search": {"space": {"r": [1]}, "sampler": "nobodys", "trials": 2}}, "search.sampler"),
        ({"search": {"space": {"r": [1]}, "objective": {"metric": "f1"}}}, "is never logged"),
        ({"search": {"space": {"target_modules": ["qq_proj"]}}}, "qq_proj"),
        ({"defaults": {}}, "eval.split"),
        ({"defaults": {"eval": {"split": 99}}}, "error: job 't': eval.split 99 would hold out"),
        ({"search": {"space": {"r": [2]}, "max_tokens": -1}}, "search.max_tokens: must be at leas"),
        ({"jobs": [], "search": {"space": {"r": [2]}}}, "a sweep has one task and no jobs"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(sweep, tlora_command, capsys, changes, words):
    """And nothing is written."""
    write({**sweep, **changes})
    assert tlora_command("tune", "sweep.yaml") == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said
    assert not Path("runs").exists()


def test_an_override_without_its_section_is_told_where_it_belongs(sweep, tlora_command, capsys):
    """One that a job has, too, is the job's."""
    assert tlora_command("tune", "sweep.yaml", "-o", "trials=4") == 2
    assert "trials: belongs in 'search': -o search.trials=4" in capsys.readouterr().err
    assert tlora_command("tune", "sweep.yaml", "-o", "keep=0.5", "-o", "seed=x") == 2
    said = capsys.readouterr().err
    assert "belongs in 'early_exit': -o early_exit.keep=0.5" in said and "train.seed" in said


def test_all_trials_failing_is_exit_code_1(sweep, tlora_command, capsys):
    """With where to look."""
    write({**sweep, "search": {"space": {"lr": [1e38]}}})
    assert tlora_command("tune", "sweep.yaml") == 1
    assert "no trial came to a value" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_told_before_anything_is_tried(
    sweep, tlora_command, capsys, monkeypatch
):
    """Not after hours."""
    for place, message in (
        ("no/study.json", "there is no directory no"),
        (".", ". is a directory; name a file"),
        ("study.json", "study.json cannot be written; name another file"),
    ):
        if message.endswith("another file"):
            # Whoever runs this may write everywhere.
            monkeypatch.setattr("os.access", lambda _, mode: mode != os.W_OK)
        assert tlora_command("tune", "sweep.yaml", "--json", place) == 2
        assert f"--json: {message}" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_what_cannot_be_asked_is_said(sweep, tlora_command, capsys):
    """No sweep there, no such trial, no such field."""
    assert tlora_command("cancel", "t-00", "--run", "nowhere") == 2
    assert tlora_command("tune", "sweep.yaml", "-o", "train.max_steps=2") == 0
    assert tlora_command("cancel", "t-9", "--run", "runs/sweep") == 2
    assert "there are t-00, t-01" in capsys.readouterr().err
    assert tlora_command("clone", "t-00", "--run", "runs/sweep", "-o", "eval.split=3") == 2
    assert "evaluated alike" in capsys.readouterr().err
    log = StudyLog(Path("runs/sweep/state.sqlite"))
    assert log.open_requests() == []
    log.close()


def test_the_schema_of_a_sweep(tlora_command, capsys):
    """By the same verb."""
    assert tlora_command("schema", "--sweep") == 0
    assert "early_exit" in json.loads(capsys.readouterr().out)["properties"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--devices", "9"], "--devices: 9 were asked for, and no more than 4 trials"),
        (["--devices", "0"], "--devices"),
        (["--devices", "two"], "--devices"),
        (["--devices", "2", "--measure-fusion"], "--measure-fusion"),
        (["--devices", "2", "-o", "search.max_parallel=1"], "no more than 1 trials train at once"),
    ],
)
def test_wrong_numbers_of_devices_are_exit_code_2(sweep, tlora_command, capsys, options, words):
    """In one message, and nothing is written."""
    assert tlora_command("tune", "sweep.yaml", *options) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said
    assert not Path("runs").exists()


class FakeStudy(SimpleNamespace):
    interrupted = False
    best: object = None

    def as_json(self) -> dict:
        return {}


def test_a_sweep_that_was_stopped_names_the_command_that_goes_on(
    sweep, tlora_command, capsys, monkeypatch
):
    """As it was typed, but for starting over: that would throw away what was trained."""
    monkeypatch.setattr(
        "tlora.runtime.sweeps.tune.tune", lambda *_, **__: FakeStudy(interrupted=True)
    )
    typed = ["tune", "sweep.yaml", "--output", "my runs", "-o", "seed=3", "--measure-fusion"]
    assert tlora_command(*typed, "-o", "search.seed=2", "--fresh", "--yes") == 130
    said = " ".join(capsys.readouterr().err.split())
    assert said == (
        "error: interrupted: go on from here with: tlora tune sweep.yaml --output 'my runs' "
        "--override seed=3 --override search.seed=2 --measure-fusion"
    )


def test_a_task_without_a_winner_is_named(sweep, tlora_command, capsys, monkeypatch):
    """Beside one that has one: exit code 1 all the same."""
    studies = {"a": FakeStudy(best="a-00"), "b": FakeStudy()}
    monkeypatch.setattr(
        "tlora.runtime.sweeps.tasks.tune_on_devices",
        lambda *_, **__: SimpleNamespace(studies=studies, as_json=dict),
    )
    task = sweep.pop("task")
    write({**sweep, "tasks": [{**task, "name": name} for name in studies]})
    assert tlora_command("tune", "sweep.yaml") == 1
    assert "no trial of b came to a value" in capsys.readouterr().err
