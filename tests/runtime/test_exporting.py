"""An adapter is told of only when its files do what the trained one did."""

import copy
from pathlib import Path

import pytest
import torch
from support.models import job_spec, random_adapter, sequences_of, super_model, tiny_model

from tlora.core.errors import AdapterError
from tlora.core.job import BaseSpec
from tlora.model import peft_format
from tlora.model.peft_format import read_adapter
from tlora.runtime import exporting
from tlora.runtime.exporting import export

BASE = BaseSpec(model="org/base")


@pytest.fixture(scope="module")
def plain():
    return tiny_model()


@pytest.fixture
def model(plain):
    return super_model(plain, reserve_rows=4)


def export_to(directory: Path, model, weights) -> None:
    [probe] = sequences_of([40], seed=1)
    export(directory, weights, job_spec(alpha=2), BASE, model, probe)


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
    """Their rows, gradients and moments, to the bit, although the pool has to make room."""
    weights = random_adapter(plain, rank=4, seed=2)
    model.attach("a", weights, scale=0.5)
    for views in model.views("a").values():
        views.grad.normal_()
        views.exp_avg.normal_()
    before = {name: [t.clone() for t in views] for name, views in model.views("a").items()}
    export_to(tmp_path / "adapter", model, weights)
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
    with pytest.raises(AdapterError, match="job 'a': the exported files give other logits"):
        export_to(tmp_path / "adapter", model, weights)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert (tmp_path / "adapter" / peft_format.CONFIG).read_text() == before


def test_weights_that_are_not_finite_are_not_exported(tmp_path: Path, model, plain) -> None:
    """Neither under the job's name nor beside it."""
    weights = random_adapter(plain, rank=4, seed=1)
    next(iter(weights.values())).a[0, 0] = torch.nan
    with pytest.raises(AdapterError, match="not finite"):
        export_to(tmp_path / "adapter", model, weights)
    assert list(tmp_path.iterdir()) == []
    assert model.jobs == []


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
