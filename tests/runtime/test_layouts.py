"""The layout that is read from a model is the one that is written down for its shape."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from tlora.costs.layout import NAMED
from tlora.runtime.benchmark.shapes import LLAMA, RANDOM_SHAPES
from tlora.runtime.layouts import layout_of

CONFIGS = {
    "llama-1b": LlamaConfig(**LLAMA, **RANDOM_SHAPES["llama-1b"]),
    "llama-8b": LlamaConfig(**LLAMA, **RANDOM_SHAPES["llama-8b"]),
    "qwen-32b": Qwen2Config(
        vocab_size=152_064,
        hidden_size=5120,
        intermediate_size=27_648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "llama-70b": LlamaConfig(
        **LLAMA
        | {
            "hidden_size": 8192,
            "intermediate_size": 28_672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "head_dim": 128,
            "tie_word_embeddings": False,
        }
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_named_layouts_are_those_of_the_models(name: str) -> None:
    """Every number of it; the weights of a layer may stand in another order."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    found, written = layout_of(model, name=name, itemsize=2), NAMED[name]
    assert [sorted(layer.shapes) for layer in found.layers] == [
        sorted(layer.shapes) for layer in written.layers
    ]
    assert replace(found, layers=()) == replace(written, layers=())
