"""`tlora plan`: groups, figures and reasons for a person, and as JSON."""

import json
from pathlib import Path

import pytest
from support.models import save_base
from support.runs import write_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plan")
    save_base(root / "base")
    write_rows(root / "rows.jsonl", 12)
    (root / "jobs.yaml").write_text(
        "base: base\nengine: {device: cpu}\n"
        "defaults: {data: rows.jsonl, train: {max_length: 64, max_steps: 10}}\n"
        "jobs: [{name: a, lora: {r: 2}}, {name: b, lora: {r: 4}}]\n"
    )
    return root


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))


def test_a_plan_names_groups_jobs_figures_and_reasons(tlora_command, capsys) -> None:
    """And the file has the same."""
    assert tlora_command("plan", "jobs.yaml", "--gpus", "1", "--json", "plan.json") == 0
    out = capsys.readouterr().out
    assert "1 GPU, policy tlora" in out
    assert "assumed from the base's shape" in out
    assert "Start g0 with" in out
    assert "GPUs' worth" in out
    plan = json.loads(Path("plan.json").read_text())
    assert plan["kind"] == "plan"
    assert sorted(job for group in plan["groups"] for job in group["jobs"]) == ["a", "b"]
    assert not Path("runs").exists()


def test_what_cannot_be_planned_is_bad_input(tlora_command, capsys) -> None:
    """A policy or profile that is not there, no GPU, a file that cannot be written."""
    for args, message in (
        (("--gpus", "1", "--policy", "best"), "none of"),
        (("--gpus", "1", "--profile", "no.json"), "--profile: 'no.json' is neither a file nor"),
        (("--gpus", "0"), "Usage"),
        (("--gpus", "1", "--json", "no/plan.json"), "--json: there is no directory"),
        (("--gpus", "1", "--json", "."), "--json: . is a directory"),
        (("--gpus", "2", "--output", "."), "--output: . is a directory"),
    ):
        assert tlora_command("plan", "jobs.yaml", *args) == 2
        assert message in capsys.readouterr().err


def test_several_gpus_show_how_a_group_could_be_laid_out(tlora_command, capsys) -> None:
    """All jobs as one group: each candidate with its figures and why it lost; the best one is
    written as a plan file."""
    from tlora.config import load_plan

    args = ("plan", "jobs.yaml", "--gpus", "2", "--json", "two.json", "--output", "plan.yaml")
    assert tlora_command(*args) == 0
    out = capsys.readouterr().out
    assert "All jobs as one group, in lock-step:" in out
    assert "communication" in out
    assert "of the best:" in out
    assert "Best on 2 GPUs:" in out
    choice = json.loads(Path("two.json").read_text())["one_group"]
    best = load_plan(choice["best"])
    assert load_plan("plan.yaml") == best
    assert {each["plan"]["fsdp"] for each in choice["candidates"]} == {1, 2}
    assert sum(each["is_best"] for each in choice["candidates"]) == 1


def test_one_gpu_shows_groups_alone(tlora_command, capsys) -> None:
    """There is nothing to lay out, and no plan to write."""
    assert tlora_command("plan", "jobs.yaml", "--gpus", "1") == 0
    assert "lock-step" not in capsys.readouterr().out
    assert tlora_command("plan", "jobs.yaml", "--gpus", "1", "--output", "p.yaml") == 2
    assert "one needs no plan" in capsys.readouterr().err


def test_a_shape_is_planned_on_paper(tlora_command, capsys) -> None:
    """Without a job file; what is assumed is said."""
    args = ("plan", "--shape", "llama-70b", "--gpus", "8", "--json", "paper.json")
    assert tlora_command(*args) == 0
    out = capsys.readouterr().out
    assert "extrapolated from llama-8b" in out
    assert "links assumed" in out
    assert "not executed yet" in out
    assert json.loads(Path("paper.json").read_text())["best"]["fsdp"] > 1


def test_a_file_or_a_shape_is_needed(tlora_command, capsys) -> None:
    """Not both, not neither, no shape that is not known, no plan where nothing fits."""
    for args, message in (
        (("--gpus", "2"), "name a job file, or a --shape"),
        (("jobs.yaml", "--shape", "llama-8b", "--gpus", "2"), "name a job file, or a --shape"),
        (("jobs.yaml", "--jobs", "3", "--gpus", "2"), "--jobs: is for --shape"),
        (("--shape", "llama-9b", "--gpus", "2"), "none of llama-1b"),
        (("--shape", "llama-70b", "--gpus", "1", "--output", "p.yaml"), "Nothing fits on 1 GPU"),
        (("--shape", "llama-8b", "--gpus", "1", "--output", "no/p.yaml"), "no directory"),
    ):
        assert tlora_command("plan", *args) == 2
        assert message in capsys.readouterr().err
