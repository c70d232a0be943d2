"""Which file a name stands for, and which names may be on the Hub."""

import os
from pathlib import Path

import pytest

from tlora.config import load_spec
from tlora.core.assets import DEMO
from tlora.core.errors import SpecError
from tlora.core.job import RunSpec


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for job files, beside the one where we stand."""
    (tmp_path / "here").mkdir()
    (tmp_path / "specs").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "specs"


def load(folder: Path, job: str = "", base: str = "org/model") -> RunSpec:
    file = folder / "jobs.yaml"
    file.write_text(f"base: {base}\njobs:\n  - {{name: a, {job or 'data: org/rows'}}}\n")
    return load_spec(file)


def refuse(folder: Path, job: str = "", base: str = "org/model") -> SpecError:
    with pytest.raises(SpecError) as caught:
        load(folder, job, base)
    return caught.value


def test_a_file_beside_the_job_file_comes_before_one_where_we_stand(folder: Path) -> None:
    """A job file and its data travel together; the path found is absolute."""
    (folder / "rows.jsonl").touch()
    Path("rows.jsonl").touch()
    assert load(folder, "data: rows.jsonl").jobs[0].data.path == str(folder / "rows.jsonl")


def test_a_file_where_we_stand_is_found_too(folder: Path) -> None:
    """As a shell user expects."""
    Path("rows.jsonl").touch()
    found = load(folder, "data: {path: rows.jsonl, eval_path: rows.jsonl}").jobs[0].data
    assert found.path == found.eval_path == os.path.abspath("rows.jsonl")


def test_a_home_directory_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` is the shell's, but files have no shell."""
    monkeypatch.setenv("HOME", str(folder))
    (folder / "rows.jsonl").touch()
    assert load(folder, "data: ~/rows.jsonl").jobs[0].data.path == str(folder / "rows.jsonl")


def test_a_pattern_becomes_the_sorted_files_it_matches(folder: Path) -> None:
    """What was trained on is then on record."""
    for name in ("b.jsonl", "a.jsonl", "c.csv"):
        (folder / name).touch()
    expected = (str(folder / "a.jsonl"), str(folder / "b.jsonl"))
    assert load(folder, "data: '*.jsonl'").jobs[0].data.path == expected


def test_a_file_whose_name_looks_like_a_pattern_is_found_as_it_is(folder: Path) -> None:
    """Brackets in names are common."""
    (folder / "rows[1].jsonl").touch()
    found = load(folder, "data: {path: 'rows[1].jsonl'}").jobs[0].data.path
    assert found == str(folder / "rows[1].jsonl")


@pytest.mark.parametrize("name", ["rows.jsonl", "org/rows.jsonl", "./rows", "rows", "/no/where"])
def test_missing_data_is_refused_by_job_and_field(folder: Path, name: str) -> None:
    """None of these can be a dataset on the Hub."""
    error = refuse(folder, f"data: {name}")
    assert (error.job, error.field) == ("a", "data.path")
    assert f"no such file: '{name}'" in error.message


def test_a_pattern_without_matches_is_refused(folder: Path) -> None:
    """It is said to be a pattern."""
    assert "no file matches: '*.jsonl'" in refuse(folder, "data: '*.jsonl'").message


def test_missing_held_out_data_is_refused(folder: Path) -> None:
    """Under its own field."""
    error = refuse(folder, "data: {path: org/rows, eval_path: held-out.jsonl}")
    assert (error.job, error.field) == ("a", "data.eval_path")


def test_an_empty_list_of_files_is_refused(folder: Path) -> None:
    """There would be nothing to learn from."""
    assert "at least one file" in refuse(folder, "data: {path: []}").message


@pytest.mark.parametrize("name", ["org/rows", "org/rows-v1.5", "HuggingFaceH4/ultra_chat.200k"])
def test_a_dataset_id_is_left_for_the_hub(folder: Path, name: str) -> None:
    """Digits after a dot are a version, not a file type."""
    assert load(folder, f"data: {name}").jobs[0].data.path == name


def test_a_missing_adapter_to_start_from_is_refused(folder: Path) -> None:
    """A file in its place does not do either."""
    (folder / "file").touch()
    for name, message in (
        ("nowhere", "no such adapter directory: 'nowhere'"),
        ("file", "must be an adapter directory: 'file' is a file"),
    ):
        error = refuse(folder, f"data: org/rows, init_from: {name}")
        assert (error.job, error.field) == ("a", "init_from")
        assert message in error.message


def test_an_adapter_to_start_from_is_found_beside_the_job_file(folder: Path) -> None:
    """Like data."""
    (folder / "adapter").mkdir()
    job = load(folder, "data: org/rows, init_from: adapter").jobs[0]
    assert job.init_from == str(folder / "adapter")


def test_a_chat_template_is_a_file_or_a_template(folder: Path) -> None:
    """Anything else is a file that is not there."""
    (folder / "chat.jinja").touch()
    data = "data: {{path: org/rows, chat_template: {}}}"
    found = load(folder, data.format("chat.jinja")).jobs[0].data.chat_template
    assert found == str(folder / "chat.jinja")
    text = load(folder, data.format("'{{ messages }}'")).jobs[0].data.chat_template
    assert text == "{{ messages }}"
    error = refuse(folder, data.format("chatt.jinja"))
    assert (error.job, error.field) == ("a", "data.chat_template")


def test_a_local_model_is_found_and_a_model_id_is_left_alone(folder: Path) -> None:
    """Only directories are models."""
    (folder / "model").mkdir()
    (folder / "gpt2").touch()
    assert load(folder, base="model").base.model == str(folder / "model")
    assert load(folder, base="gpt2").base.model == "gpt2"
    assert load(folder, base="Qwen/Qwen3-8B").base.model == "Qwen/Qwen3-8B"


def test_demo_is_the_base_that_comes_with_tlora(folder: Path) -> None:
    """From any folder; a folder of that name without a checkpoint in it is no rival."""
    assert load(folder, base="demo").base.model == str(DEMO / "base")
    (folder / "demo").mkdir()
    assert load(folder, base="demo").base.model == str(DEMO / "base")


def test_a_checkpoint_called_demo_comes_before_the_one_that_comes_with_tlora(folder: Path) -> None:
    """Who has one means it."""
    (folder / "demo").mkdir()
    (folder / "demo" / "config.json").touch()
    assert load(folder, base="demo").base.model == str(folder / "demo")


@pytest.mark.parametrize("name", ["./model", "../model", "/no/model", "~/no-model"])
def test_a_missing_model_directory_is_refused(folder: Path, name: str) -> None:
    """A name that starts like a path is one."""
    error = refuse(folder, base=name)
    assert error.field == "base.model" and f"'{name}'" in error.message


def test_a_replaced_path_need_not_exist(folder: Path) -> None:
    """Only the settings that a job ends up with are looked up."""
    file = folder / "jobs.yaml"
    file.write_text("base: org/model\njobs: [{name: a, data: gone.jsonl}]")
    assert load_spec(file, ["data.path=org/rows"]).jobs[0].data.path == "org/rows"
