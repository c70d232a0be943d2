"""Jobs that differ in everything, a tiny model and rows to train them on: what the laws are tried
on."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support.curves import random_rows
from tlora.core.job import DataSpec, JobSpec, LoraSpec, TrainSpec

VOCABULARY = 96
STEPS = 50


def base_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.08,
    )
    return LlamaForCausalLM(config)


def job(name: str, seed: int, lora: dict, train: dict) -> JobSpec:
    lora = {"lora_alpha": 2.0 * lora["r"], **lora}
    train = {"max_steps": STEPS, "seed": seed, **train}
    return JobSpec(
        name=name,
        data=DataSpec(path="in memory"),
        lora=LoraSpec(**lora),
        train=TrainSpec(**train),
    )


ATTENTION = ("q_proj", "v_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
JOBS = [
    job("one", 1, {"r": 1}, {"batch_size": 1, "learning_rate": 1e-3}),
    job(
        "odd",
        2,
        {"r": 5, "lora_dropout": 0.1, "target_modules": ATTENTION},
        {
            "batch_size": 3,
            "learning_rate": 2e-3,
            "lr_scheduler_type": "linear",
            "warmup_steps": 5,
            "weight_decay": 0.1,
        },
    ),
    job(
        "dropped",
        3,
        {"r": 16, "lora_dropout": 0.3},
        {"batch_size": 8, "learning_rate": 5e-4, "max_grad_norm": 0.3},
    ),
    job(
        "wide",
        4,
        {"r": 32, "lora_dropout": 0.05, "target_modules": MLP},
        {
            "batch_size": 16,
            "lr_scheduler_type": "constant",
            "adam_beta1": 0.8,
            "adam_beta2": 0.95,
            "max_grad_norm": None,
        },
    ),
    job(
        "upper-layer",
        5,
        {"r": 8, "use_rslora": True, "target_modules": r".*layers\.1\..*proj"},
        {"batch_size": 2, "lr_scheduler_type": "wsd", "warmup_steps": 0.1, "adam_epsilon": 1e-6},
    ),
    job(
        "widest",
        6,
        {"r": 64, "target_modules": ("q_proj", "o_proj", "up_proj")},
        {"batch_size": 4, "learning_rate": 1e-3, "lr_scheduler_type": "inverse_sqrt"},
    ),
]
BY_NAME = {spec.name: spec for spec in JOBS}
ROWS = {spec.name: random_rows(spec.train.seed, 50, VOCABULARY) for spec in JOBS}
