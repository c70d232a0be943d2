"""`tlora train`: what it hands to the runtime, and how it ends."""

import inspect
from io import StringIO
from pathlib import Path

import pytest

from tlora.cli.options import ON_RECORD
from tlora.cli.train import train
from tlora.runtime.elastic.roll import Again
from tlora.runtime.group.launched import Started


@pytest.fixture
def old_run(job_file) -> Path:
    folder = Path("runs/jobs")
    folder.mkdir(parents=True)
    (folder / "run.json").touch()
    return folder


def test_results_go_under_runs_by_default(job_file, runtime, tlora_command) -> None:
    """In a folder named like the file."""
    assert tlora_command("train", "jobs.yaml") == 0
    [(spec, output, fresh)] = runtime.calls
    assert [job.name for job in spec.jobs] == ["a", "b"]
    assert (output, fresh) == (Path("runs/jobs"), False)
    assert spec.engine.isolation == "default"


def test_options_reach_the_spec_and_the_runtime(job_file, runtime, tlora_command) -> None:
    """Isolation is a field of the spec like any other."""
    args = ["--output", "out", "--isolation", "exact", "--fresh", "-o", "lr=1e-3", "-o", "r=2"]
    assert tlora_command("train", "jobs.yaml", *args) == 0
    [(spec, output, fresh)] = runtime.calls
    assert (output, fresh, spec.engine.isolation) == (Path("out"), True, "exact")
    assert [(job.train.learning_rate, job.lora.r) for job in spec.jobs] == [(1e-3, 2), (1e-3, 2)]


def test_several_devices_are_scheduled(job_file, runtime, tlora_command) -> None:
    """One is not, and fewer make no sense."""
    args = ("--devices", "2", "--policy", "solo", "--profile", "p.json", "--output", "out")
    assert tlora_command("train", "jobs.yaml", *args) == 0
    [(_, options)] = runtime.calls
    assert options == {
        "output": Path("out"),
        "devices": 2,
        "fresh": False,
        "profile": "p.json",
        "policy": "solo",
    }
    assert tlora_command("train", "jobs.yaml", "--devices", "1") == 0
    assert len(runtime.calls[1]) == 3
    assert tlora_command("train", "jobs.yaml", "--devices", "0") == 2


def test_a_name_that_there_is_not_is_refused_on_one_device_too(
    job_file, runtime, tlora_command, capsys
) -> None:
    """Though nobody asks for a policy or a profile there."""
    for option in ("--policy", "--profile"):
        assert tlora_command("train", "jobs.yaml", option, "sollo") == 2
        assert f"{option}: 'sollo' is n" in capsys.readouterr().err
    assert tlora_command("train", "jobs.yaml", "--policy", "solo") == 0
    assert len(runtime.calls) == 1


def test_a_plan_has_no_policy(job_file, runtime, tlora_command, capsys) -> None:
    """Nothing is read or trained."""
    for plan in ("plan.yaml", "auto"):
        assert tlora_command("train", "jobs.yaml", "--plan", plan, "--policy", "solo") == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "--policy: is for workers, and --plan trains one group" in said
    assert not runtime.calls


@pytest.mark.parametrize("verb", ["train", "tune", "demo"])
def test_an_output_without_a_name_is_refused(verb, job_file, runtime, tlora_command, capsys):
    """As of a shell's variable that is not set: it would be the current directory."""
    assert tlora_command(verb, *(["jobs.yaml"] if verb != "demo" else []), "--output", "") == 2
    assert "names no directory" in capsys.readouterr().err
    assert runtime.calls == []


def test_what_a_run_is_started_with_is_kept_for_whoever_goes_on_with_it(
    job_file, runtime, tlora_command
) -> None:
    """All that is not in its resolved.yaml: an option that nobody thought of, too."""
    record = ("--output", "out", "--isolation", "exact", "-o", "lr=1e-3", "--fresh", "--yes")
    plain = ("--devices", "2", "--profile", "my profile.json", "--policy", "solo")
    assert tlora_command("train", "jobs.yaml", *record, *plain) == 0
    assert runtime.again == Again(options=plain)
    assert tlora_command("train", "jobs.yaml") == 0
    assert runtime.again == Again()
    parameters = inspect.signature(train).parameters.keys() - {"context", *ON_RECORD}
    assert parameters == {"devices", "plan", "profile", "policy"}


@pytest.mark.parametrize(
    ("ranks", "launcher"),
    [
        (2, "torchrun --nproc-per-node 2 -m tlora"),
        (8, "torchrun --nproc-per-node 2 --nnodes 4 ... -m tlora"),
    ],
)
def test_a_run_that_torchrun_started_is_gone_on_with_by_it(ranks: int, launcher: str) -> None:
    """On as many nodes; where these meet is for a person to say."""
    assert Started(0, ranks, 2, 0).launcher == tuple(launcher.split())


def test_an_unknown_isolation_is_bad_usage(job_file, runtime, tlora_command) -> None:
    """The option knows its words."""
    assert tlora_command("train", "jobs.yaml", "--isolation", "total") == 2
    assert runtime.calls == []


def test_failed_jobs_are_named_and_exit_with_one(job_file, runtime, tlora_command, capsys) -> None:
    """The others were trained all the same."""
    runtime.failed = ["b"]
    assert tlora_command("train", "jobs.yaml") == 1
    assert capsys.readouterr().err == "error: failed: b; the reasons are in runs/jobs\n"


def test_a_run_that_was_stopped_names_the_command_that_goes_on(
    job_file, runtime, tlora_command, capsys
) -> None:
    """As it was typed, but for starting over: that would throw away what was trained."""
    runtime.interrupted = True
    typed = ["train", "jobs.yaml", "--output", "my runs", "-o", "train.max_steps=3"]
    assert tlora_command(*typed, "--fresh", "--yes") == 130
    said = " ".join(capsys.readouterr().err.split())
    assert said == (
        "error: interrupted: go on from here with: tlora train jobs.yaml --output 'my runs' "
        "--override train.max_steps=3"
    )


@pytest.mark.parametrize(("answer", "agreed"), [("y\n", True), ("n\n", False), ("", False)])
def test_starting_over_asks_first_where_there_is_something_to_lose(
    old_run, runtime, tlora_command, monkeypatch, capsys, answer, agreed
) -> None:
    """No answer, as without a terminal, means no."""
    monkeypatch.setattr("sys.stdin", StringIO(answer))
    assert tlora_command("train", "jobs.yaml", "--fresh") == (0 if agreed else 2)
    assert [call[2] for call in runtime.calls] == ([True] if agreed else [])
    errors = capsys.readouterr().err
    assert "start over?" in errors
    assert agreed or "nothing was removed from runs/jobs" in errors


def test_yes_answers_for_scripts(old_run, runtime, tlora_command) -> None:
    """Nothing is asked."""
    assert tlora_command("train", "jobs.yaml", "--fresh", "--yes") == 0
    assert runtime.calls[0][2] is True
