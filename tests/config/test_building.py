"""Settings built into dataclasses: what is missing, what a name may be, what the checks say."""

from pathlib import Path

import pytest

from tlora.config import load_spec
from tlora.config.building import build_job, build_run
from tlora.config.layers import Fault
from tlora.core.job import JobSpec, RunSpec

HERE = Path()


def test_flat_settings_become_nested_dataclasses() -> None:
    """Whole numbers become floats where the field is one."""
    job = build_job({"name": "a", "data.path": "org/rows", "lora.lora_alpha": 4}, HERE)
    assert isinstance(job, JobSpec)
    assert (job.lora.lora_alpha, type(job.lora.lora_alpha)) == (4.0, float)


def test_missing_data_and_a_missing_model_are_told_by_their_full_names() -> None:
    """Also where the whole section is missing."""
    assert build_job({"name": "a"}, HERE) == [
        Fault("data.path", "is required: a file or directory with the job's rows")
    ]
    assert build_run({}, HERE) == [
        Fault("base.model", "is required: a model's name on the Hub, its directory, or demo")
    ]


@pytest.mark.parametrize("name", ["My Job", "a/b", "-a", "x" * 64, ".."])
def test_a_bad_name_is_refused_beside_other_faults(name: str) -> None:
    """A name is also a directory."""
    faults = build_job({"name": name, "data.path": "org/rows", "lora.r": 0}, HERE)
    assert isinstance(faults, list)
    assert [fault.field for fault in faults] == ["name", "lora.r"]
    assert "must match" in faults[0].message and f"'{name}'" in faults[0].message


@pytest.mark.parametrize("name", ["run.json", "events.jsonl", "wandb"])
def test_a_job_cannot_be_called_like_a_file_of_the_run(name: str) -> None:
    """Its directory would lie where that file has to."""
    faults = build_job({"name": name, "data.path": "org/rows"}, HERE)
    assert isinstance(faults, list)
    assert faults[0].field == "name" and "file of the run directory" in faults[0].message


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_beyond_64_bits_is_refused(seed: int) -> None:
    """Another seed would give the same order and the same dropout."""
    faults = build_job({"name": "a", "data.path": "org/rows", "train.seed": seed}, HERE)
    assert isinstance(faults, list) and faults[0].field == "train.seed"


def test_every_section_and_path_tells_its_fault() -> None:
    """One round shows them all."""
    values = {
        "name": "a",
        "data.path": "gone.jsonl",
        "lora.r": 0,
        "train.weight": 0,
        "eval.split": -1,
        "save.steps": 0,
        "init_from": "gone",
    }
    faults = build_job(dict(values), HERE)
    assert isinstance(faults, list)
    assert {fault.field for fault in faults} == values.keys() - {"name"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [("none", ()), (None, ()), ("wandb", ("wandb",)), (["wandb", "mlflow"], ("wandb", "mlflow"))],
)
def test_report_to_takes_a_name_a_list_or_none(given: object, expected: tuple[str, ...]) -> None:
    """The forms that transformers takes."""
    jobs = [{"name": "a", "data": "org/rows"}]
    assert load_spec({"base": "org/m", "jobs": jobs, "report_to": given}).report_to == expected


def test_the_top_of_a_run_is_checked_without_its_jobs() -> None:
    """Bad jobs do not hide a bad engine."""
    assert isinstance(build_run({"base.model": "org/m"}, HERE), RunSpec)
    faults = build_run({"base.model": "./gone", "engine.nano_batch_tokens": 0}, HERE)
    assert isinstance(faults, list)
    assert [fault.field for fault in faults] == ["base.model", "engine.nano_batch_tokens"]
