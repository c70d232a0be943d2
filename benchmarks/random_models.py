"""Models of published shapes with random weights, with fewer layers where depth does not matter."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_utils import PreTrainedModel

from tlora.runtime.benchmark.shapes import LLAMA, RANDOM_SHAPES

# For a look at a script on a CPU.
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
SHAPES = ("llama-1b", "llama-8b", "tiny")
LENGTHS = (40, 47, 97, 120, 148, 173, 190, 224, 280, 317, 340, 392, 539, 746)
"""Quantiles of instruction sets as they are published, in tokens."""


def random_model(shape: str, device: torch.device, *, layers: int | None = None) -> PreTrainedModel:
    """bfloat16 on CUDA, else float32; the same weights every time, never zeros."""
    settings = dict(TINY) if shape == "tiny" else {**LLAMA, **RANDOM_SHAPES[shape]}
    if layers is not None:
        settings["num_hidden_layers"] = layers
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        with torch.device(device):
            config = LlamaConfig(**settings)  # type: ignore[arg-type]
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(device).eval()


def vocabulary_of(model: PreTrainedModel) -> int:
    return model.config.vocab_size
