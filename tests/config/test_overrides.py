"""`-o K=V`: where a setting goes, and what is said when it goes nowhere."""

import pytest

from tlora.config import load_spec
from tlora.core.errors import SpecError, SpecErrors
from tlora.core.job import RunSpec

TREE: dict[str, object] = {
    "base": "org/model",
    "defaults": {"data": "org/rows", "lr": 1e-2},
    "jobs": [{"name": "a"}, {"name": "a.b", "lora": {"r": 4}, "train": {"lr": 1e-3}}],
}


def load(*overrides: str) -> RunSpec:
    return load_spec(TREE, overrides)


def refuse(*overrides: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load(*overrides)
    return caught.value


def test_without_a_prefix_a_field_goes_to_every_job_and_wins() -> None:
    """Over the job's own value too."""
    assert [job.lora.r for job in load("lora.r=8").jobs] == [8, 8]
    assert [job.train.learning_rate for job in load("lr=1e-4").jobs] == [1e-4, 1e-4]


def test_in_the_defaults_a_field_stays_below_the_jobs() -> None:
    """The job that says otherwise keeps its own."""
    rates = [job.train.learning_rate for job in load("defaults.train.lr=5e-4").jobs]
    assert rates == [5e-4, 1e-3]


def test_a_job_is_found_by_the_longest_name_that_fits() -> None:
    """Names may hold dots."""
    assert [job.lora.r for job in load("jobs.a.b.lora.r=9").jobs] == [16, 9]
    assert [job.lora.r for job in load("jobs.a.lora.r=9").jobs] == [9, 4]


def test_run_fields_are_set_too() -> None:
    """Base, engine and trackers."""
    spec = load("base.dtype=fp32", "engine.nano_batch_tokens=512", "report_to=[wandb]")
    assert spec.base.dtype == "float32" and spec.base.model == "org/model"
    assert spec.engine.nano_batch_tokens == 512 and spec.report_to == ("wandb",)


def test_the_value_is_yaml() -> None:
    """Lists, mappings and null."""
    spec = load("target_modules=[q_proj, v_proj]", "max_grad_norm=null", "eval={steps: 3}")
    job = spec.jobs[0]
    assert job.lora.target_modules == ("q_proj", "v_proj")
    assert job.train.max_grad_norm is None and job.eval.steps == 3


def test_a_key_below_a_mapping_is_set_alone() -> None:
    """Columns are addressed by dots as well."""
    job = load("data.columns.prompt=q", "data.columns.completion=a").jobs[0]
    assert job.data.columns == {"prompt": "q", "completion": "a"}


def test_of_two_overrides_the_later_wins() -> None:
    """As on every command line."""
    assert load("lora.r=8", "rank=2").jobs[0].lora.r == 2
    assert load("lora.r=8", "jobs.a.rank=2").jobs[0].lora.r == 2


def test_a_value_may_hold_an_equals_sign() -> None:
    """Only the first one parts key and value."""
    assert load("base.revision=a=b").base.revision == "a=b"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.max_stesp=5", ("train.max_stesp", "did you mean 'max_steps'?")),
        ("learningrate=5", ("learningrate", "did you mean 'learning_rate'?")),
        ("bse.model=x", ("bse", "unknown key")),
        ("engine.devic=cpu", ("engine.devic", "did you mean 'device'?")),
        ("defaults.lora.rnk=5", ("defaults.lora.rnk", "did you mean 'rank'?")),
        ("jobs.a.lora.rnk=5", ("job 'a'", "lora.rnk", "did you mean 'rank'?")),
        ("jobs.aa.lora.r=5", ("no such job", "did you mean 'a'?")),
        ("jobs=5", ("name a field below 'jobs'",)),
        ("defaults=5", ("name a field below 'defaults'",)),
        ("lora.r", ("FIELD=VALUE",)),
        ("=5", ("FIELD=VALUE",)),
        ("lora.r=[", ("override 'lora.r=['",)),
        ("lora=5", ("lora", "must be a mapping")),
    ],
)
def test_a_bad_override_is_quoted_with_the_nearest_right_one(
    override: str, parts: tuple[str, ...]
) -> None:
    """Also where the job is unknown or the text is no K=V."""
    error = refuse(override)
    assert not isinstance(error, SpecErrors)
    assert all(part in str(error) for part in (*parts, override.partition("=")[0]))


def test_a_value_out_of_range_is_told_once_for_all_jobs() -> None:
    """And names the override, not the jobs."""
    error = refuse("batch_size=0")
    assert error.job is None and error.field == "train.batch_size"
    assert "must be at least 1, got 0 (override 'batch_size=0')" in error.message


def test_a_value_of_the_wrong_type_names_the_override() -> None:
    """The file may be right."""
    error = refuse("train.lr=fast")
    assert error.field == "train.learning_rate"
    assert "must be a number, got 'fast'" in error.message and "train.lr=fast" in error.message
