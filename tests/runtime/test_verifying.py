"""`tlora verify`: a good adapter passes, and each way to be wrong is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import job_spec, random_adapter, save_base, tiny_model

from tlora.core.errors import AdapterError, ModelError
from tlora.core.job import BaseSpec
from tlora.model.adapters import LoraPair
from tlora.model.loading import load_base
from tlora.model.peft_format import CONFIG, WEIGHTS, export_adapter
from tlora.model.targets import find_targets
from tlora.runtime import verifying
from tlora.runtime.verifying import verify_adapter


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """A random one of rank 4, on everything."""
    return write_adapter(tmp_path / "adapter", base)


def write_adapter(directory: Path, base: Path, *, trained: bool = True) -> Path:
    model = tiny_model(vocab_size=259)
    weights = {
        path: pair if trained else LoraPair(pair.a, torch.zeros_like(pair.b))
        for path, pair in random_adapter(model, rank=4, seed=1).items()
    }
    job = job_spec(alpha=2)
    targets = find_targets(model)
    export_adapter(directory, weights, job.lora, base_model=str(base), targets=targets)
    return directory


def change_config(adapter: Path, **values: object) -> None:
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**config, **values}))


def test_a_good_adapter_is_described_and_compared_with_peft(adapter: Path, base: Path) -> None:
    """Rank, scale, base, our own path, PEFT's, and how much it changes."""
    title, ours, peft, change = verify_adapter(adapter)
    assert title == f"{adapter}: rank 4, scale 0.5, 14 linears of {base}"
    assert ours.startswith("logits equal to tlora's own path within")
    assert peft.startswith("logits equal to PEFT within")
    assert change.startswith("changes the base model's logits by")


def test_an_untrained_adapter_is_pointed_out(tmp_path: Path, base: Path) -> None:
    """Its B is zero: it serves the base."""
    lines = verify_adapter(write_adapter(tmp_path / "adapter", base, trained=False))
    assert "never trained?" in lines[-1]


def test_without_peft_it_is_said(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is checked all the same."""
    monkeypatch.setattr(verifying, "peft_logits", lambda *others: None)
    assert "PEFT is not installed: not compared with it" in verify_adapter(adapter)


def test_a_configuration_that_reaches_less_than_the_files_hold_is_refused(adapter: Path) -> None:
    """PEFT leaves the other matrices out without an error; the logits tell."""
    change_config(adapter, target_modules=["q_proj"])
    with pytest.raises(AdapterError, match="PEFT gives other logits"):
        verify_adapter(adapter)


def test_a_configuration_that_peft_cannot_load_is_refused(adapter: Path) -> None:
    """With PEFT's reason, as an error about the adapter."""
    change_config(adapter, target_modules=["nowhere"])
    with pytest.raises(AdapterError, match=r"PEFT cannot load it: .*nowhere"):
        verify_adapter(adapter)


def test_a_damaged_file_is_refused_before_anything_is_computed(adapter: Path) -> None:
    """The tensor is named."""
    tensors = load_file(adapter / WEIGHTS)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(AdapterError, match=f"{lost} is missing"):
        verify_adapter(adapter)


def test_an_adapter_that_overflows_is_refused(adapter: Path) -> None:
    """Finite matrices can give logits that are not."""
    tensors = {name: tensor * 1e30 for name, tensor in load_file(adapter / WEIGHTS).items()}
    save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(AdapterError, match="gives logits that are not finite"):
        verify_adapter(adapter)


def test_the_base_is_the_one_given_or_the_one_named(adapter: Path, base: Path) -> None:
    """An adapter that names none needs --base; a base that is not there is an error about it."""
    change_config(adapter, base_model_name_or_path=None)
    with pytest.raises(AdapterError, match="does not name its base model; give it with --base"):
        verify_adapter(adapter)
    assert f"of {base}" in verify_adapter(adapter, str(base))[0]
    (adapter.parent / "empty").mkdir()
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        verify_adapter(adapter, str(adapter.parent / "empty"))


@pytest.fixture
def narrow_adapter(tmp_path: Path) -> Path:
    """The same on a base in bfloat16."""
    base = save_base(tmp_path / "narrow", dtype=torch.bfloat16)
    return write_adapter(tmp_path / "adapter-of-narrow", base)


def test_a_good_adapter_of_a_bfloat16_base_passes_the_same_check(narrow_adapter: Path) -> None:
    """Computed in float32 with the base's weights as they are: equal to float32 rounding."""
    _, ours, peft, _ = verify_adapter(narrow_adapter)
    for line in (ours, peft):
        assert float(line.rpartition(" ")[2]) < 1e-5, line


@pytest.mark.parametrize("of", ["adapter", "narrow_adapter"])
def test_our_own_path_is_part_of_the_check(
    of: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the kernels were off by 1 % of the scale, it would say so, in bfloat16 too."""
    adapter = request.getfixturevalue(of)
    honest = verifying.adapter_logits
    monkeypatch.setattr(
        verifying,
        "adapter_logits",
        lambda model, weights, scale, probe: honest(model, weights, 1.01 * scale, probe),
    )
    with pytest.raises(AdapterError, match="tlora's own path gives other logits"):
        verify_adapter(adapter)


def test_the_tests_base_is_a_real_checkpoint(base: Path) -> None:
    """Guards the fixture: the model in memory is the one on disk."""
    loaded = load_base(BaseSpec(model=str(base)), torch.device("cpu"))
    made = tiny_model(vocab_size=259, max_position_embeddings=128)
    for (name, one), (_, other) in zip(
        loaded.named_parameters(), made.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
