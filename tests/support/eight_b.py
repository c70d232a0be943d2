"""The linears of Llama 3 8B on a CUDA device, with random weights."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tlora.model.super_model import SuperModel

VOCABULARY = 1024


def super_model(layers: int = 2, *, reserve_rows: int, compiled: bool = False) -> SuperModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        dtype=torch.bfloat16,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    return SuperModel(model, reserve_rows=reserve_rows, compiled=compiled)
