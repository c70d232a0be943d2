"""A base in shards: read piece by piece, and the same model as the whole one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import loading_runner, rank_shards
from support.ranks import Ranks
from transformers import LlamaConfig, LlamaForCausalLM

from tlora.core.errors import ModelError
from tlora.core.job import BaseSpec
from tlora.parallel import shard_loading

KINDS = (
    *("tied", "bfloat16", "biased", "checkpointed", "kept", "kept in part", "kept, checkpointed"),
    "kept, compiled",
    pytest.param("checkpointed, compiled", marks=pytest.mark.slow),
)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 MB, so that it stands out."""
    path = tmp_path_factory.mktemp("large")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
    )
    LlamaForCausalLM(config).save_pretrained(path, max_shard_size="30MB")
    return path


def test_a_rank_never_holds_the_whole_base(large: Path) -> None:
    """One of eight ranks takes less than a half of what the model has, pages of files included;
    loading it whole takes all of that, which the measure sees."""
    command = [sys.executable, loading_runner.__file__, str(large)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"]
    assert found["shards"] < 0.5 * found["model"]
    assert found["whole"] > 0.9 * found["model"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_shards_computes_what_it_computes_whole(
    kind: str, ranks: Ranks, tmp_path: Path
) -> None:
    """Losses and gradients to the bit: tied heads, narrow formats, biases, recomputed layers,
    layers that stay gathered, and compiled ones beside the whole model's."""
    rank_shards.save_variant(kind, tmp_path)
    for same in ranks.call(rank_shards.same_in_shards, 2, kind=kind, path=str(tmp_path)):
        assert same == {"losses": True, "gradients": True, "refuses": True}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "cannot be read"),
        (lambda path: _rename(path, "model.norm.weight"), "no weight named model.norm.weight"),
    ],
    ids=["no file", "another name"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(spoil, message: str, tmp_path: Path) -> None:
    """With the weight's name, before any rank waits for another."""
    rank_shards.save_variant("plain", tmp_path)
    spoil(tmp_path)
    with pytest.raises(ModelError, match=message):
        files = shard_loading._files_of(tmp_path)
        model = shard_loading.load_shape(BaseSpec(model=str(tmp_path)))
        shard_loading._fill_parameters(model.to_empty(device="cpu"), files)


def test_buffers_that_are_saved_are_read(tmp_path: Path) -> None:
    """They are learnt, and the model would make them anew; in no file they are refused."""
    rank_shards.save_variant("plain", tmp_path)
    learnt = torch.arange(1.0, 5.0)

    def with_buffer() -> LlamaForCausalLM:
        model = shard_loading.load_shape(BaseSpec(model=str(tmp_path)))
        model.model.layers[0].mlp.register_buffer("bias", torch.zeros(4))
        return model.to_empty(device="cpu")

    files = shard_loading._files_of(tmp_path)
    with pytest.raises(ModelError, match=r"no weight named model\.layers\.0\.mlp\.bias"):
        shard_loading._fill_parameters(with_buffer(), files)
    save_file({"model.layers.0.mlp.bias": learnt}, tmp_path / "bias.safetensors")
    files["model.layers.0.mlp.bias"] = tmp_path / "bias.safetensors"
    model = with_buffer()
    shard_loading._fill_parameters(model, files)
    assert torch.equal(model.get_buffer("model.layers.0.mlp.bias"), learnt)


def _rename(path: Path, name: str) -> None:
    weights = load_file(path / "model.safetensors")
    weights[f"{name}.old"] = weights.pop(name)
    save_file(weights, path / "model.safetensors")
