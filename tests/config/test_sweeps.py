"""Sweep files: what is read, and what is said of what is wrong."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tlora.config import load_spec, load_sweep, load_tasks, sweep_schema
from tlora.core.errors import SpecError
from tlora.core.sweep import METRICS, AxisSpec, When, trial_of

FILE = """
base: {model: org/model}
defaults: {lora: {lora_alpha: 8}, train: {max_steps: 20}, eval: {split: 0.1, steps: 5}}
task: {name: sql, data: org/rows}
search:
  space:
    train.lr: {log: [1.0e-5, 1.0e-2]}
    lora.r: [4, 16, 64]
    batch_size: [1, 4]
    lora.lora_dropout: {values: [0, 0.1], when: {r: [16, 64]}}
  sampler: grid
  trials: 80
  objective: {metric: eval_loss, mode: min}
early_exit: {method: alto, warmup: 0.05, keep: 0.25}
"""


def tree(**changes: Any) -> dict[str, Any]:
    return {**yaml.safe_load(FILE), **changes}


def searching(**changes: Any) -> dict[str, Any]:
    return tree(search={**yaml.safe_load(FILE)["search"], **changes})


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in tree().items() if name not in names}


def test_a_sweep_file_is_read_with_every_spelling(tmp_path: Path) -> None:
    """Texts become the fields' own types, aliases their canonical names."""
    path = tmp_path / "sweep.yaml"
    path.write_text(FILE)
    spec = load_sweep(path, ["search.trials=90", "train.max_steps=7", "early_exit.keep=0.5"])
    assert [axis.field for axis in spec.search.space] == [
        "train.learning_rate",
        "lora.r",
        "train.batch_size",
        "lora.lora_dropout",
    ]
    assert spec.search.space[0] == AxisSpec(
        field="train.learning_rate", kind="log", low=1e-5, high=1e-2
    )
    assert spec.search.space[3].when == (When(field="lora.r", values=(16, 64)),)
    assert (spec.search.trials, spec.task.train.max_steps) == (90, 7)
    assert (spec.early_exit.keep, spec.early_exit.warmup) == (0.5, 0.05)
    assert load_sweep(tree(early_exit="none")).early_exit.method == "none"
    assert load_sweep(tree(), ["early_exit=none"]).early_exit.method == "none"


def test_a_trial_is_the_task_with_some_fields_replaced() -> None:
    """And nothing else; what does not go together is named with the trial."""
    task = load_sweep(tree()).task
    trial = trial_of(task, "sql-3", {"train.learning_rate": 1e-3, "lora.r": 64})
    assert (trial.name, trial.lora.r, trial.train.learning_rate) == ("sql-3", 64, 1e-3)
    assert trial.lora.lora_alpha == 8 and trial.eval == task.eval and trial.data == task.data
    with pytest.raises(SpecError) as caught:
        trial_of(task, "sql-3", {"lora.r": 0})
    assert (caught.value.job, caught.value.field) == ("sql-3", "lora.r")


WRONG = {
    "an empty space": (searching(space={}), "search.space", "is empty"),
    "no search": ({k: v for k, v in tree().items() if k != "search"}, "search.space", "is empty"),
    "a list without values": (searching(space={"lora.r": []}), "search.space.lora.r", "no values"),
    "an unknown field": (searching(space={"lora.rnk": [1]}), "search.space.lora.rnk", "unknown"),
    "one value": (searching(space={"lora.r": 4}), "search.space.lora.r", "belongs in the task"),
    "a value of another type": (searching(space={"lora.r": ["x"]}), "search.space.lora.r", "whole"),
    "an unknown range": (searching(space={"lora.r": {"normal": [1, 2]}}), None, "'normal'"),
    "a falling range": (searching(space={"lr": {"log": [1, 0.1]}}), None, "must rise"),
    "a logarithm of zero": (searching(space={"lr": {"log": [0, 1]}}), None, "above 0"),
    "a share of a rank": (searching(space={"lora.r": {"log": [1, 8]}}), None, "use integer"),
    "its name": (searching(space={"name": ["a"]}), "search.space.name", "named by the sweep"),
    "other data": (searching(space={"data.path": ["a"]}), None, "the same data"),
    "the seed": (searching(space={"seed": [1, 2]}), "search.space.train.seed", "data.eval_path"),
    "a metric nobody logs": (
        searching(objective={"metric": "accuracy"}),
        "search.objective.metric",
        ", ".join(METRICS),
    ),
    "a direction": (searching(objective={"mode": "least"}), "search.objective.mode", "min, max"),
    "no trials": (searching(trials=0), "search.trials", "at least 1"),
    "a budget": (searching(max_tokens=0), "search.max_tokens", "at least 1"),
    "a time": (searching(max_seconds=-1), "search.max_seconds", "positive"),
    "an unknown method": (tree(early_exit={"method": "aso"}), "early_exit.method", "asha"),
    "a threshold": (tree(early_exit={"keep": 0}), "early_exit.keep", "(0, 1]"),
    "a typo": (tree(early_exit={"warm_up": 0.1}), "early_exit.warm_up", "did you mean 'warmup'?"),
    "two tasks": (tree(tasks=[]), "tasks", "one task"),
    "jobs": (tree(jobs=[]), "jobs", "tlora train"),
    "nothing held out": (
        tree(defaults={}),
        "eval.split",
        "data.eval_path",
    ),
    "a share of what is tried": (
        tree(defaults={"min_lr_rate": 0.1, "eval": {"split": 4}}),
        "train.min_lr_rate",
        "try it too",
    ),
    "a share of what is tried, in a list of tasks": (
        {
            **without("task"),
            "tasks": [
                {
                    "name": "sql",
                    "data": "org/rows",
                    "train": {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
                }
            ],
        },
        "train.min_lr_rate",
        "try it too",
    ),
    "a length": (searching(space={"max_length": [64, 128]}), None, "on other ones; set it in the"),
    "long rows": (searching(space={"train.over_length": ["drop", "truncate"]}), None, "other ones"),
    "a loss": (searching(space={"train.loss": ["sum", "dpo"]}), None, "another one for each"),
    "a step of no whole numbers": (
        searching(space={"lr": {"log": [1e-4, 1e-2], "step": 2}}),
        "search.space.lr",
        "step does nothing beside log",
    ),
    "a step of values": (
        searching(space={"lora.r": {"values": [2, 4], "step": 2}}),
        None,
        "step does nothing beside values",
    ),
    "points of values": (
        searching(space={"lora.r": {"values": [2, 4], "points": 2}}),
        "search.space.lora.r",
        "points does nothing",
    ),
    "points of no grid": (
        searching(space={"lr": {"log": [1e-4, 1e-2], "points": 3}}, sampler="random"),
        "search.space.train.learning_rate",
        "does nothing with sampler random",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(what: str) -> None:
    """Field and cure, in one message."""
    file, field, words = WRONG[what]
    with pytest.raises(SpecError) as caught:
        load_sweep(file)
    assert words in str(caught.value)
    assert field is None or caught.value.field == field


def pairs_sweep(field: str, metric: str) -> dict[str, Any]:
    """Preference jobs that differ in one field."""
    objective = {"metric": metric, "mode": "min" if metric == "eval_loss" else "max"}
    file = searching(space={field: [0.1, 0.3]}, objective=objective)
    file["task"] = {**file["task"], "train": {"loss": "dpo"}}
    return file


@pytest.mark.parametrize("field", ["train.beta", "train.label_smoothing"])
def test_what_scales_the_loss_of_pairs_is_tried_by_accuracy_alone(field: str) -> None:
    """Loss and margin of another beta say nothing; which answer is preferred does."""
    for metric in ("eval_loss", "eval_margin"):
        with pytest.raises(SpecError, match=f"by {metric}.*eval_accuracy") as caught:
            load_sweep(pairs_sweep(field, metric))
        assert caught.value.field == f"search.space.{field}"
    assert load_sweep(pairs_sweep(field, "eval_accuracy")).search.space[0].field == field
    overridden = ["search.objective.metric=eval_accuracy", "search.objective.mode=max"]
    assert load_sweep(pairs_sweep(field, "eval_loss"), overridden).search.space
    back = ["search.objective.metric=eval_loss", "search.objective.mode=min"]
    with pytest.raises(SpecError, match="cannot be tried by eval_loss"):
        load_sweep(pairs_sweep(field, "eval_accuracy"), back)


def test_a_share_of_the_learning_rate_is_found_wherever_it_is_written() -> None:
    """In an override, too; one that a min_lr lies over is none any more, and where the rate is not
    tried it means what it says."""
    with pytest.raises(SpecError, match="try it too"):
        load_sweep(tree(), ["train.min_lr_rate=0.1"])
    with pytest.raises(SpecError, match="try it too"):
        load_sweep(tree(), ["defaults.train.min_lr_rate=0.1"])
    shared = tree(defaults={"min_lr_rate": 0.1, "eval": {"split": 4}})
    assert load_sweep(shared, ["train.min_lr=1e-6"]).task.train.min_lr == 1e-6
    alone = {**shared, "search": {"space": {"lora.r": [2, 4]}}}
    task = load_sweep(alone).task
    assert task.train.min_lr == pytest.approx(0.1 * task.train.learning_rate)


def test_everything_wrong_is_told_at_once() -> None:
    """The task's faults with those of the search."""
    file = searching(space={"lora.r": []}, objective={"mode": "least"})
    file["task"] = {"name": "Sql", "data": "org/rows"}
    with pytest.raises(SpecError) as caught:
        load_sweep(file)
    for words in ("lists no values", "min, max", "how about 'sql'?"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("serach", "did you mean 'search'?"),
        ("default", "did you mean 'defaults'?"),
        (
            "zzz",
            "known here: base, defaults, early_exit, engine, report_to, search, task, tasks",
        ),
        ("lora", "'lora' belongs in 'task' or in 'defaults'"),
        ("space", "'space' belongs in 'search'"),
        ("metric", "'metric' belongs in 'search.objective'"),
        ("dtype", "'dtype' belongs in 'base'"),
    ],
)
def test_a_key_that_nobody_knows_is_told_what_a_sweep_file_has(key: str, said: str) -> None:
    """At its top; nothing that a job file has and a sweep has not."""
    with pytest.raises(SpecError) as caught:
        load_sweep(tree(**{key: {}}))
    assert str(caught.value) == f"{key}: unknown key; {said}"


@pytest.mark.parametrize("key", ["task", "tasks"])
def test_a_sweep_is_no_job_file(key: str, tmp_path: Path) -> None:
    """`tlora train` says what the file is and which verb runs it, and nothing else; a sweep beside
    jobs is a job file with keys too many."""
    path = tmp_path / "sweep.yaml"
    task = tree()["task"]
    path.write_text(yaml.safe_dump({**without("task"), key: task if key == "task" else [task]}))
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    said = str(caught.value)
    assert f"{path} is a sweep file: it has '{key}'" in said and "tlora tune" in said
    assert "\n" not in said
    with pytest.raises(SpecError, match="search: unknown key; 'search' makes this a sweep"):
        load_spec(tree(jobs=[{"name": "a", "data": "org/rows"}]))


def test_a_job_file_is_no_sweep(tmp_path: Path) -> None:
    """`tlora tune` says what the file is and which verb trains it; one with a search is a sweep
    that lacks a task."""
    path = tmp_path / "jobs.yaml"
    jobs = {"jobs": [{"name": "a", "data": "org/rows"}]}
    path.write_text(yaml.safe_dump({"base": "org/model", **jobs}))
    for load in (load_sweep, load_tasks):
        with pytest.raises(SpecError) as caught:
            load(path)
        said = str(caught.value)
        assert f"{path} is a job file" in said and "tlora train" in said and "\n" not in said
    with pytest.raises(SpecError, match="a sweep has one task and no jobs"):
        load_sweep({**without("task"), **jobs})


def test_the_schema_knows_every_field() -> None:
    """Those of the search, the rules, and the fields that can be tried."""
    properties: Any = sweep_schema()["properties"]
    assert {"base", "defaults", "task", "search", "early_exit", "engine"} <= set(properties)
    assert "jobs" not in properties
    search = properties["search"]["properties"]
    assert {"space", "sampler", "trials", "objective", "max_tokens"} <= set(search)
    tried = search["space"]["properties"]
    assert "lora.r" in tried and "name" not in tried and "eval.split" not in tried
    assert "overfitting_gap" in properties["early_exit"]["anyOf"][1]["properties"]
