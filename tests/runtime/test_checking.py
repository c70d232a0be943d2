"""`tlora check`: what `train` would refuse, without the weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models import job_spec, random_adapter, save_base, tiny_model
from support.runs import job_file

from tlora.config import load_spec
from tlora.core.errors import DataError, ModelError, SpecError, SpecErrors
from tlora.model.peft_format import WEIGHTS, export_adapter
from tlora.model.targets import find_targets
from tlora.runtime.checking import check_run, check_start, prepare_jobs


@pytest.fixture(scope="module")
def targets():
    return find_targets(tiny_model())


@pytest.fixture
def start(tmp_path: Path, targets) -> Path:
    """An adapter of rank 4 and scale 2 on every linear."""
    weights = random_adapter(tiny_model(), rank=4, seed=1)
    lora = job_spec(alpha=8).lora
    export_adapter(tmp_path / "start", weights, lora, base_model="b", targets=targets)
    return tmp_path / "start"


def test_every_job_is_described_without_reading_the_weights(tmp_path: Path, rows: Path) -> None:
    """Linears, trained parameters and what the data holds; the weights may be absent."""
    base = save_base(tmp_path / "base")
    (base / "model.safetensors").unlink()
    small = {"name": "b", "data": {"path": str(rows)}, "lora": {"target_modules": ["q_proj"]}}
    lines = check_run(load_spec(job_file(base, {"name": "a", "data": {"path": str(rows)}}, small)))
    # Per layer q, o: 2 x 64; k, v: 2 x 48; gate, up, down: 3 x 80; all times rank 2, two layers.
    assert lines[0] == f"a: 14 linears, {2 * 2 * (128 + 96 + 240):,} trained parameters"
    assert f"b: 2 linears, {2 * 2 * 64:,} trained parameters" in lines
    assert any("20 rows of" in line for line in lines)


def test_a_wrong_name_is_found_before_the_data_is_read(base: Path, tmp_path: Path) -> None:
    """A tokenizer can take minutes over a large file."""
    (tmp_path / "rows.jsonl").write_text("not JSON\n")
    data = {"path": str(tmp_path / "rows.jsonl")}
    spec = load_spec(
        job_file(base, {"name": "a", "data": data, "lora": {"target_modules": ["nope"]}})
    )
    with pytest.raises(SpecError, match=r"job 'a': lora\.target_modules: 'nope' reaches no"):
        check_run(spec)
    with pytest.raises(DataError):
        check_run(load_spec(job_file(base, {"name": "a", "data": data})))


def test_a_start_that_fits_is_accepted(start: Path, targets) -> None:
    """Rank, modules and scale; alpha may be written in the way of rsLoRA."""
    check_start(job_spec(alpha=8, init_from=str(start)), targets)
    check_start(job_spec(alpha=4, rslora=True, init_from=str(start)), targets)
    check_start(job_spec(), targets)


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (job_spec(r=8), "has rank 4, the job asks for 8"),
        (job_spec(targets=("q_proj",)), "they differ in model.layers.0.mlp.down_proj"),
        (job_spec(alpha=16), "was scaled by 2, the job scales by 4; set lora_alpha to 8"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(start: Path, targets, job, reason: str) -> None:
    """With the job, the field, the directory and the difference."""
    with pytest.raises(SpecError) as caught:
        check_start(replace(job, init_from=str(start)), targets)
    assert (caught.value.job, caught.value.field) == ("a", "init_from")
    assert str(start) in str(caught.value) and reason in str(caught.value)


def test_a_start_that_is_damaged_is_refused_with_job_and_field(start: Path, targets) -> None:
    """Not only with the file's name."""
    (start / WEIGHTS).write_bytes(b"")
    with pytest.raises(SpecError) as caught:
        check_start(job_spec(alpha=8, init_from=str(start)), targets)
    assert (caught.value.job, caught.value.field) == ("a", "init_from")
    assert f"{WEIGHTS}: cut short" in str(caught.value)


@pytest.mark.parametrize("held_out", [False, True])
def test_rows_beyond_the_models_context_are_refused(
    base: Path, rows: Path, tmp_path: Path, held_out: bool
) -> None:
    """In training or only in what is held out: a longer position has no meaning to the model."""
    long = tmp_path / "long.jsonl"
    long.write_text('{"prompt": "q", "completion": "%s"}\n' % ("x" * 200))
    data = {"path": str(rows), "eval_path": str(long)} if held_out else {"path": str(long)}
    job = {"name": "a", "data": data, "train": {"max_length": 500}}
    with pytest.raises(SpecError, match=r"job 'a': train.max_length: rows .* takes 128"):
        check_run(load_spec(job_file(base, job)))
    job["train"] = {"max_length": 128}
    assert check_run(load_spec(job_file(base, job)))


def test_checking_keeps_no_weights_in_memory(base: Path, rows: Path) -> None:
    """Only the shape is built."""
    made: list[torch.device] = []
    original = torch.nn.Linear.__init__

    def watching(self, *args, **settings):
        original(self, *args, **settings)
        made.append(self.weight.device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Linear, "__init__", watching)
        check_run(load_spec(job_file(base, {"name": "a", "data": {"path": str(rows)}})))
    assert {device.type for device in made} == {"meta"}


def test_a_tracker_that_is_not_installed_is_found(base: Path, rows: Path, monkeypatch) -> None:
    """Before training, and before the data is read."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    job = {"name": "a", "data": {"path": str(rows)}}
    spec = load_spec(job_file(base, job, report_to=["wandb"]))
    with pytest.raises(SpecError, match="report_to: wandb is not installed; pip install"):
        check_run(spec)


def test_a_device_that_is_not_there_is_found(base: Path, rows: Path, monkeypatch) -> None:
    """Before the model is looked at."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    job = {"name": "a", "data": {"path": str(rows)}}
    with pytest.raises(ModelError, match=r"engine\.device: cuda was asked for"):
        check_run(load_spec(job_file(base, job, engine={"device": "cuda"})))


def test_rows_that_exact_nano_batches_cannot_hold_are_found(base: Path, rows: Path) -> None:
    """By job and field, as when the run is started."""
    engine = {"device": "cpu", "isolation": "exact", "nano_batch_tokens": 2}
    spec = load_spec(job_file(base, {"name": "a", "data": {"path": str(rows)}}, engine=engine))
    with pytest.raises(SpecError, match="exact isolation runs nano-batches of 2") as caught:
        check_run(spec)
    assert (caught.value.job, caught.value.field) == ("a", "train.max_length")


def test_patience_without_held_out_rows_is_refused_by_name(base: Path, rows: Path) -> None:
    """Whoever asked for it, the job or its defaults; with rows held out either way it is fine."""
    data = {"path": str(rows)}
    for defaults, own in (({}, {"patience": 2}), ({"patience": 2}, {})):
        job = {"name": "a", "data": data, "eval": own}
        with pytest.raises(SpecError, match=r"job 'a': eval\.patience: .* set eval\.split"):
            load_spec(job_file(base, job, defaults={"eval": defaults}))
        load_spec(job_file(base, {**job, "eval": {**own, "split": 2}}, defaults={"eval": defaults}))
        held_out = {**data, "eval_path": str(rows)}
        load_spec(job_file(base, {**job, "data": held_out}, defaults={"eval": defaults}))


def test_evaluation_steps_without_held_out_rows_get_a_word(base: Path, rows: Path) -> None:
    """They may come from defaults that other jobs share, so they are no error."""
    job = {"name": "a", "data": {"path": str(rows)}, "eval": {"steps": 2}}
    lines = check_run(load_spec(job_file(base, job)))
    assert lines[-1].startswith("a: no rows are held out, so eval.steps does nothing")
    other = {**job, "eval": {"steps": 2, "split": 4}}
    assert "does nothing" not in "".join(check_run(load_spec(job_file(base, other))))


def test_rows_with_an_empty_answer_get_a_word(base: Path, tmp_path: Path) -> None:
    """Under the job that has them, with where they are; they are not refused."""
    rows = [{"prompt": f"How many? {n}", "completion": "" if n == 3 else "two"} for n in range(6)]
    for name, some in (("some", rows), ("none", rows[:3])):
        text = "".join(json.dumps(row) + "\n" for row in some)
        (tmp_path / f"{name}.jsonl").write_text(text)
    jobs = [{"name": n, "data": {"path": str(tmp_path / f"{n}.jsonl")}} for n in ("some", "none")]
    lines = check_run(load_spec(job_file(base, *jobs)))
    (place,) = [place for place, line in enumerate(lines) if "empty" in line]
    assert place < next(at for at, line in enumerate(lines) if line.startswith("none: "))
    assert lines[place].endswith(f"trained: 1 rows ({tmp_path / 'some.jsonl'}:4)")


def test_what_is_wrong_with_data_is_told_of_all_jobs_at_once(tmp_path: Path) -> None:
    """Each with its job and place; one problem alone is raised as it is."""
    good = tmp_path / "good.jsonl"
    good.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text("")
    jobs = [
        {"name": name, "data": {"path": str(tmp_path / f"{name}.jsonl")}}
        for name in ("good", "one", "two")
    ]
    file = {"base": {"model": "demo"}, "jobs": jobs}
    with pytest.raises(SpecErrors) as caught:
        prepare_jobs(load_spec(file), limit=None)
    assert "job 'one'" in str(caught.value) and "job 'two'" in str(caught.value)
    file["jobs"] = jobs[:2]
    with pytest.raises(DataError) as alone:
        prepare_jobs(load_spec(file), limit=None)
    assert alone.value.job == "one"
