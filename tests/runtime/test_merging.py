"""A merged checkpoint is the base with its adapter, and nothing else."""

import pytest
import torch
from support.models import save_base
from support.runs import job_file
from transformers import AutoModelForCausalLM

import tlora
from tlora.core.errors import AdapterError, SpecError
from tlora.runtime.merging import merge_adapter


def trained_adapter(base, rows, folder):
    spec = tlora.load_spec(job_file(base, {"name": "only", "data": {"path": str(rows)}}))
    assert not tlora.train(spec, output=folder).failed
    return folder / "only" / "adapter"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_merged_model_gives_the_logits_of_base_and_adapter(kind, rows, tmp_path):
    """Loaded by plain transformers and compared with PEFT; GPT-2 keeps its weights transposed."""
    from peft import PeftModel

    base = save_base(tmp_path / "base", kind)
    adapter = trained_adapter(base, rows, tmp_path / "run")
    merge_adapter(adapter, tmp_path / "merged")
    ids = torch.arange(3, 30)[None]
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        untouched = plain(input_ids=ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
        expected = PeftModel.from_pretrained(plain, str(adapter)).eval()(input_ids=ids).logits
    # Float32 rounding of this size of model is near 1e-6 of the largest logit.
    assert (merged - expected).abs().max() < 2e-5 * expected.abs().max()
    assert (untouched - expected).abs().max() > 1e-3 * expected.abs().max()


def test_an_existing_output_is_never_overwritten(base, rows, tmp_path):
    """The error names the option; the directory stays as it was."""
    adapter = trained_adapter(base, rows, tmp_path / "run")
    (tmp_path / "merged").mkdir()
    with pytest.raises(SpecError, match="--output"):
        merge_adapter(adapter, tmp_path / "merged")
    assert not any((tmp_path / "merged").iterdir())


def test_an_adapter_of_another_base_is_refused(base, rows, tmp_path):
    """Shapes that do not fit are named before anything is written."""
    adapter = trained_adapter(base, rows, tmp_path / "run")
    other = save_base(tmp_path / "other", hidden_size=48, head_dim=12)
    with pytest.raises(AdapterError, match="the base model and r=2 need"):
        merge_adapter(adapter, tmp_path / "merged", base=str(other))
    assert not (tmp_path / "merged").exists()
