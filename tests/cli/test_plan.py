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
    """A policy or profile that is not there, no GPU, a folder that is not there."""
    for args, message in (
        (("--gpus", "1", "--policy", "best"), "none of"),
        (("--gpus", "1", "--profile", "nothing.json"), "cannot be read"),
        (("--gpus", "0"), "Usage"),
        (("--gpus", "1", "--json", "no/plan.json"), "no directory"),
    ):
        assert tlora_command("plan", "jobs.yaml", *args) == 2
        assert message in capsys.readouterr().err
