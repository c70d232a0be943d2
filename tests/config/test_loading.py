"""Whole files in, runs or the full list of problems out."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlora.config import load_spec
from tlora.config.fields import JOB, RUN
from tlora.core.errors import SpecError, SpecErrors
from tlora.core.job import RunSpec

README_EXAMPLE = """
base: {model: Qwen/Qwen3-8B, dtype: bf16}
defaults:
  lora:  {r: 16, lora_alpha: 32, target_modules: all-linear, lora_dropout: 0.0}
  train: {learning_rate: 2.0e-4, lr_scheduler_type: cosine, warmup_steps: 0.03, num_train_epochs: 3,
          batch_size: 16, max_length: 2048, over_length: truncate, max_grad_norm: 1.0, seed: 0}
  eval:  {split: 0.02, steps: 50}
  save:  {steps: 100, total_limit: 2}
jobs:
  - {name: support, data: {path: support.jsonl}}
  - {name: sql, data: {path: sql.jsonl}, lora: {r: 64}, train: {batch_size: 4}}
"""


def run(*jobs: object, **top: object) -> RunSpec:
    return load_spec({"base": "org/model", "jobs": list(jobs), **top})


def job(**fields: object) -> dict[str, object]:
    return {"name": "a", "data": "org/rows", **fields}


def problem_of(*jobs: object, **top: object) -> SpecError:
    with pytest.raises(SpecError) as caught:
        run(*jobs, **top)
    assert not isinstance(caught.value, SpecErrors), caught.value
    return caught.value


def problems_of(*jobs: object, **top: object) -> list[str]:
    with pytest.raises(SpecErrors) as caught:
        run(*jobs, **top)
    return [str(problem) for problem in caught.value.problems]


def test_a_whole_file_is_read_with_its_defaults_under_each_job(tmp_path: Path) -> None:
    """The job's own value wins, every other comes from the defaults."""
    (tmp_path / "support.jsonl").touch()
    (tmp_path / "sql.jsonl").touch()
    file = tmp_path / "jobs.yaml"
    file.write_text(README_EXAMPLE)
    spec = load_spec(file)
    assert spec.base.dtype == "bfloat16"
    support, sql = spec.jobs
    assert (support.lora.r, sql.lora.r) == (16, 64)
    assert (support.train.batch_size, sql.train.batch_size) == (16, 4)
    assert support.train.warmup_steps == 0.03 and sql.eval.steps == 50


def test_a_json_file_gives_the_same_run_as_the_mapping(tmp_path: Path) -> None:
    """JSON is read like Python values."""
    tree = {"base": "org/model", "jobs": [job(lr=1e-4, use_rslora=True)]}
    file = tmp_path / "jobs.json"
    file.write_text(json.dumps(tree))
    assert load_spec(file) == load_spec(tree)


def test_an_alias_in_a_job_overrides_the_canonical_name_in_the_defaults() -> None:
    """Spellings are settled before layers are merged."""
    spec = run(job(rank=8), defaults={"lora": {"r": 64, "alpha": 4}})
    assert (spec.jobs[0].lora.r, spec.jobs[0].lora.lora_alpha) == (8, 4)


def test_columns_are_merged_key_by_key() -> None:
    """Defaults go deep: a mapping in a job adds to the one below it."""
    spec = run(
        job(data={"path": "org/rows", "columns": {"prompt": "q"}}),
        defaults={"data": {"columns": {"prompt": "x", "completion": "a"}}},
    )
    assert spec.jobs[0].data.columns == {"prompt": "q", "completion": "a"}


def test_the_data_may_come_from_the_defaults_alone() -> None:
    """Several jobs on one dataset need to name it once."""
    spec = run({"name": "a"}, {"name": "b", "lr": 1e-3}, defaults={"data": "org/rows"})
    assert [job.data.path for job in spec.jobs] == ["org/rows", "org/rows"]


def test_null_in_a_job_clears_the_default() -> None:
    """An explicit null is a value, not an absence."""
    spec = run(job(max_steps=-1, train={"max_grad_norm": None}), defaults={"max_steps": 5})
    assert spec.jobs[0].train.max_steps is None
    assert spec.jobs[0].train.max_grad_norm is None


def test_all_problems_are_reported_at_once() -> None:
    """One line each, with job and field."""
    lines = problems_of(
        job(lora={"rnk": 4}, lr="fast"),
        {"name": "b", "data": "org/rows", "batch_size": 0},
        engin={"device": "cpu"},
    )
    assert lines == [
        "engin: unknown key; did you mean 'engine'?",
        "job 'a': lora.rnk: unknown key; did you mean 'rank'?",
        "job 'a': train.learning_rate: must be a number, got 'fast' (written as lr)",
        "job 'b': train.batch_size: must be at least 1, got 0",
    ]


def test_a_single_problem_carries_its_job_and_field() -> None:
    """Surfaces other than a terminal read them from the error."""
    problem = problem_of(job(lora={"lora_dropout": 1.5}))
    assert (problem.job, problem.field) == ("a", "lora.lora_dropout")
    assert "[0, 1)" in problem.message


@pytest.mark.parametrize(
    ("tree", "field", "hint"),
    [
        ({"lora": {"learning_rate": 1}}, "lora.learning_rate", "belongs in 'train'"),
        ({"report_to": "wandb"}, "report_to", "belongs at the top of the file"),
        ({"learning_rat": 1}, "learning_rat", "did you mean 'learning_rate'?"),
        ({"cutof_len": 1}, "cutof_len", "did you mean 'cutoff_len'?"),
        ({"data": {"pth": "x"}}, "data.pth", "did you mean 'path'?"),
        ({"lr_scheduler_kwargs": {"min_lrr": 0}}, "lr_scheduler_kwargs.min_lrr", "'min_lr'"),
        ({"Lora": {}}, "Lora", "did you mean 'lora'?"),
    ],
)
def test_an_unknown_key_is_named_with_its_path_and_the_nearest_known(
    tree: dict[str, object], field: str, hint: str
) -> None:
    """Also where the key is right but the place is wrong."""
    problem = problem_of({**job(), **tree}, defaults={"data": "org/rows"})
    assert (problem.job, problem.field) == ("a", field)
    assert "unknown key" in problem.message and hint in problem.message


def test_a_job_field_at_the_top_of_the_file_is_sent_to_the_defaults() -> None:
    """The likeliest meaning of a flat file."""
    problem = problem_of(job(), learning_rate=1e-4)
    assert problem.field == "learning_rate" and "'defaults'" in problem.message


def test_a_fault_of_the_defaults_is_told_once() -> None:
    """Fifty jobs do not repeat it, and it names the defaults."""
    jobs = [{"name": f"job-{i}", "data": "org/rows"} for i in range(50)]
    problem = problem_of(*jobs, defaults={"lora": {"r": 0}})
    assert str(problem) == "defaults.lora.r: must be at least 1, got 0"


def test_a_bad_default_that_every_job_replaces_is_still_judged_by_the_jobs() -> None:
    """Only merged settings count."""
    assert run(job(min_lr=0), defaults={"min_lr": 1}).jobs[0].train.min_lr == 0


@pytest.mark.parametrize("jobs", [[], None, {}])
def test_a_file_without_jobs_is_refused(jobs: object) -> None:
    """There is nothing to train."""
    with pytest.raises(SpecError, match="jobs: the file lists no jobs"):
        load_spec({"base": "org/model", "jobs": jobs})


def test_jobs_must_be_a_list() -> None:
    """A mapping of jobs is not guessed at."""
    with pytest.raises(SpecError, match="jobs: must be a list of jobs, got a mapping"):
        load_spec({"base": "org/model", "jobs": {"a": {}}})


def test_an_entry_that_is_no_mapping_is_named_by_its_index() -> None:
    """Such an entry has no name to go by."""
    problem = problem_of(job(), "sql")
    assert problem.field == "jobs[1]" and "must be a mapping" in problem.message


@pytest.mark.parametrize(
    ("nameless", "message"),
    [
        ({}, "every job needs a name"),
        ({"name": ""}, "every job needs a name"),
        ({"name": None}, "must be text, got nothing"),
    ],
)
def test_a_job_without_a_name_is_named_by_its_index(
    nameless: dict[str, object], message: str
) -> None:
    """No name is made up for it, and its other problems are found too."""
    third = {"data": "org/rows", "lora": {"r": 0}, **nameless}
    lines = problems_of(job(), job(name="b"), third)
    assert lines == [
        f"jobs[2].name: {message}",
        "jobs[2].lora.r: must be at least 1, got 0",
    ]


def test_two_jobs_of_one_name_are_refused() -> None:
    """They would share a directory."""
    problem = problem_of(job(), job())
    assert (problem.job, problem.field) == ("a", "name")


def test_a_name_in_the_defaults_is_refused() -> None:
    """It would name every job."""
    assert problem_of(job(), defaults={"name": "x"}).field == "defaults.name"


def test_a_section_that_is_no_mapping_is_refused() -> None:
    """`lora: 8` does not say which field."""
    problem = problem_of(job(lora=8))
    assert problem.field == "lora" and "must be a mapping of fields, got 8" in problem.message


def test_an_empty_section_means_its_defaults() -> None:
    """YAML reads `lora:` with nothing under it as null."""
    assert run(job(lora=None, train={}), defaults=None) == run(job())


keys = sorted({key for vocabulary in (RUN, JOB) for s in vocabulary.sections.values() for key in s})
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.floats(),
    st.sampled_from(["", "a", "auto", "1e-4", "yes", "org/rows", "x.jsonl", "none", "{{ x }}"]),
    st.text(max_size=5),
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(keys), inner, max_size=5)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(base=trees, defaults=trees, jobs=st.lists(trees, max_size=3), engine=trees)
def test_whatever_a_file_holds_the_outcome_is_a_run_or_a_spec_error(
    base: object, defaults: object, jobs: list[object], engine: object
) -> None:
    """No other exception escapes, and none speaks pydantic."""
    tree = {"base": base, "defaults": defaults, "jobs": jobs, "engine": engine}
    try:
        assert isinstance(load_spec(tree), RunSpec)
    except SpecError as error:
        assert "pydantic" not in str(error) and "validation error" not in str(error)
