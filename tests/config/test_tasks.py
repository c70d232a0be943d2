"""Sweep files with several tasks."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tlora.config import load_tasks, sweep_schema
from tlora.core.errors import SpecError


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)


def file(*tasks: Any) -> dict[str, Any]:
    return {
        "base": {"model": "demo"},
        "defaults": {"eval": {"split": 4}, "lora": {"r": 4}},
        "tasks": list(tasks),
        "search": {"space": {"lr": [1e-4, 1e-3]}},
        "early_exit": {"keep": 0.5},
    }


def task(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "data": "rows.jsonl", **more}


def test_each_task_is_a_sweep_with_what_they_share(tmp_path: Path) -> None:
    """Defaults, search and rules are everyone's; paths start from the file; a task has its own
    settings; overrides reach all."""
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(file(task("a"), task("b", lora={"r": 2}))))
    one, two = load_tasks(path, ["early_exit.keep=0.3", "train.max_steps=7"])
    assert (one.task.name, one.task.lora.r, two.task.name, two.task.lora.r) == ("a", 4, "b", 2)
    assert one.search == two.search and one.base == two.base
    assert one.early_exit.keep == two.early_exit.keep == 0.3
    assert one.task.train.max_steps == two.task.train.max_steps == 7
    assert one.task.data.path == str(tmp_path / "rows.jsonl")


def test_one_task_is_a_sweep_as_it_was() -> None:
    """Under either key."""
    (one,) = load_tasks(file(task("a")))
    rest = {key: value for key, value in file().items() if key != "tasks"}
    assert load_tasks({**rest, "task": task("a")}) == (one,)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ([task("a"), task("a")], "is the name of two tasks"),
        ([task("a"), "b"], "must be a mapping"),
        ([], "give one task"),
        ([task("a"), task("b", lora={"r": 0})], "job 'b': lora.r"),
    ],
)
def test_what_is_wrong_is_named(tasks: list[Any], words: str) -> None:
    """Task and field."""
    with pytest.raises(SpecError) as caught:
        load_tasks(file(*tasks))
    assert words in str(caught.value)


def test_the_schema_knows_both_keys() -> None:
    """One of them, for editors."""
    schema = sweep_schema()
    assert schema["oneOf"] == [{"required": ["task"]}, {"required": ["tasks"]}]
