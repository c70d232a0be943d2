"""An adapter is told of only when its files do what the trained one did."""

import copy
from pathlib import Path

import pytest
import torch
from support.models import job_spec, random_adapter, sequences_of, super_model, tiny_model

from tlora.core.errors import AdapterError
from tlora.core.job import BaseSpec
from tlora.model import linear, peft_format
from tlora.model.adapters import LoraPair
from tlora.model.job_rows import of_weights
from tlora.model.peft_format import read_adapter
from tlora.runtime import exporting
from tlora.runtime.exporting import begin_export

BASE = BaseSpec(model="org/base")


@pytest.fixture(scope="module")
def plain():
    return tiny_model()


@pytest.fixture
def model(plain):
    return super_model(plain, reserve_rows=4)


def export_to(directory: Path, model, weights=None) -> None:
    """Job 'a', attached with these weights or already."""
    [probe] = sequences_of([40], seed=1)
    job = job_spec(alpha=2)
    if weights is not None:
        if job.name in model.jobs:
            model.detach(job.name)
        model.attach(job.name, weights, scale=job.lora.scale)
    snapshot = model.snapshot(job.name, of_weights)
    begin_export(snapshot, job, BASE, model, probe)(directory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_files_hold_the_weights_to_the_bit(tmp_path: Path, plain, dtype) -> None:
    """Float32 whatever the base's format."""
    model = super_model(plain.to(dtype))
    plain.float()
    weights = random_adapter(plain, rank=4, seed=1)
    export_to(tmp_path / "adapter", model, weights)
    back = read_adapter(tmp_path / "adapter", model.targets)
    assert back.scale == 0.5
    for path, pair in back.weights.items():
        assert torch.equal(pair.a, weights[path].a) and torch.equal(pair.b, weights[path].b)


def test_the_jobs_in_training_are_left_as_they_were(tmp_path: Path, model, plain) -> None:
    """Their rows, gradients and moments, to the bit."""
    weights = random_adapter(plain, rank=4, seed=2)
    model.attach("a", weights, scale=0.5)
    for views in model.views("a").values():
        views.grad.normal_()
        views.exp_avg.normal_()
    before = {name: [t.clone() for t in views] for name, views in model.views("a").items()}
    export_to(tmp_path / "adapter", model)
    assert model.jobs == ["a"]
    for name, views in model.views("a").items():
        assert all(torch.equal(t, old) for t, old in zip(views, before[name], strict=True))
    model.check_integrity()


def lose_scale(config):
    return {**config, "lora_alpha": config["lora_alpha"] * 1.01}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_that_do_something_else_are_refused(
    tmp_path: Path, plain, dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that gets the scale wrong by 1 %: an error that names the job, and the adapter of
    before stays, alone; in bfloat16 too, where rounding is larger than that."""
    model = super_model(copy.deepcopy(plain).to(dtype))
    weights = random_adapter(plain, rank=4, seed=1)
    export_to(tmp_path / "adapter", model, weights)
    before = (tmp_path / "adapter" / peft_format.CONFIG).read_text()
    honest = peft_format.adapter_config
    monkeypatch.setattr(
        peft_format, "adapter_config", lambda *args, **named: lose_scale(honest(*args, **named))
    )
    with pytest.raises(AdapterError, match="job 'a': the exported files hold another adapter"):
        export_to(tmp_path / "adapter", model, weights)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert (tmp_path / "adapter" / peft_format.CONFIG).read_text() == before


def test_weights_that_are_not_finite_are_not_exported(tmp_path: Path, model, plain) -> None:
    """Neither under the job's name nor beside it."""
    model.attach("a", random_adapter(plain, rank=4, seed=1), scale=1.0)
    next(iter(model.views("a").values())).value[0, 0] = torch.nan
    with pytest.raises(AdapterError, match="not finite"):
        export_to(tmp_path / "adapter", model)
    assert list(tmp_path.iterdir()) == []


def swap_two_rows(directory, weights, *others, **settings):
    """A writer that puts two rows of one matrix into each other's place."""
    path, pair = next(iter(weights.items()))
    swapped = LoraPair(a=pair.a[[1, 0, *range(2, len(pair.a))]], b=pair.b)
    peft_format.export_adapter(directory, {**weights, path: swapped}, *others, **settings)


def test_an_adapter_beyond_the_format_of_copies_is_told_as_one(plain, monkeypatch) -> None:
    """Not as a job that nobody has."""
    monkeypatch.setattr(linear, "operand_dtype", lambda *_: torch.float16)
    model, weights = super_model(plain, reserve_rows=4), random_adapter(plain, rank=4, seed=1)
    [probe] = sequences_of([40], seed=1)
    assert exporting.adapter_logits(model, weights, 0.5, probe).isfinite().all()
    next(iter(weights.values())).a[0, 0] = 7e4
    with pytest.raises(AdapterError, match=r"weights on .* that are no finite numbers in float16"):
        exporting.adapter_logits(model, weights, 0.5, probe)
    assert not model.jobs


def test_files_with_other_matrices_are_refused(tmp_path: Path, model, plain, monkeypatch) -> None:
    """The right sizes and numbers in the wrong order."""
    monkeypatch.setattr(exporting, "export_adapter", swap_two_rows)
    with pytest.raises(AdapterError, match="job 'a': the exported files hold another adapter"):
        export_to(tmp_path / "adapter", model, random_adapter(plain, rank=4, seed=1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_job_that_was_trained_otherwise_than_its_matrices_say_is_refused(
    tmp_path: Path, plain, dtype
) -> None:
    """Its logits came from a scale that is off by 1 %."""
    model = super_model(copy.deepcopy(plain).to(dtype))
    job = job_spec(alpha=2)
    weights = random_adapter(plain, rank=4, seed=1)
    model.attach(job.name, weights, scale=1.01 * job.lora.scale)
    with pytest.raises(AdapterError, match="job 'a': the exported matrices give other logits"):
        export_to(tmp_path / "adapter", model)
    assert list(tmp_path.iterdir()) == []


def test_what_was_looked_at_is_what_is_written(tmp_path: Path, model, plain) -> None:
    """The job has gone on, and left, before the files are written."""
    weights = random_adapter(plain, rank=4, seed=1)
    job, [probe] = job_spec(alpha=2), sequences_of([40], seed=1)
    model.attach(job.name, weights, scale=job.lora.scale)
    write = begin_export(model.snapshot(job.name, of_weights), job, BASE, model, probe)
    for rows in model.views(job.name).values():
        rows.value.add_(1.0)
    model.detach(job.name)
    write(tmp_path / "adapter")
    back = read_adapter(tmp_path / "adapter", model.targets)
    assert exporting.same_matrices(back.weights, weights)
    next(iter(weights.values())).b[0, 0] += 1e-6
    assert not exporting.same_matrices(back.weights, weights)


def test_the_probe_is_bounded(model, plain) -> None:
    """A sequence of any length costs at most the probe's tokens."""
    [probe] = sequences_of([60], seed=1)
    logits = exporting.base_logits(model, probe)
    assert logits.shape == (exporting.PROBE_TOKENS - 1, 128)


def test_a_copy_replaces_an_adapter_whole(tmp_path: Path) -> None:
    """The same bytes and nothing of the old one; a source that is not there leaves it alone."""
    best, adapter = tmp_path / "best", tmp_path / "adapter"
    best.mkdir()
    (best / "adapter_model.safetensors").write_bytes(b"new")
    adapter.mkdir()
    (adapter / "old").write_text("old")
    with pytest.raises(OSError):
        exporting.copy(tmp_path / "nowhere", adapter)
    assert [path.name for path in adapter.iterdir()] == ["old"]
    exporting.copy(best, adapter)
    assert [path.name for path in adapter.iterdir()] == ["adapter_model.safetensors"]
    assert (adapter / "adapter_model.safetensors").read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "best"]
