"""Tiny random models of many architectures, adapters for them, and the plain way to run both."""

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_utils import PreTrainedModel

from tlora.core.job import DataSpec, JobSpec, LoraSpec, TrainSpec
from tlora.core.sequence import TokenSequence
from tlora.model.adapters import AdapterWeights, LoraPair
from tlora.model.packing import PackedBatch, Share, pack
from tlora.model.plain import plain_adapter
from tlora.model.super_model import SuperModel
from tlora.model.targets import find_targets

VOCABULARY = 128
WINDOW = 6

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
# Windows shorter than the tests' sequences and caps near the scores, so that both matter.
SOFT_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}

SUPPORTED: dict[str, dict[str, object]] = {
    "llama": GROUPED,
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": GROUPED,
    "mistral": {**GROUPED, "sliding_window": WINDOW},
    "gemma": {"num_key_value_heads": 1, "head_dim": 8},
    "gemma2": {**GROUPED, **SOFT_CAPS, "sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {
        **GROUPED,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi": {},
    "phi3": {"num_key_value_heads": 2, "sliding_window": WINDOW},
    "gpt_neox": {},
    "gpt2": GPT2,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}
WINDOWED = [kind for kind, settings in SUPPORTED.items() if "sliding_window" in settings]


def tiny_model(kind: str = "llama", *, seed: int = 0, **settings: object) -> PreTrainedModel:
    """Weights ten times the usual start, norms and biases moved off theirs: attention is far from
    uniform, and nothing that a path forgets is zero or one."""
    generator = torch.Generator().manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**COMMON, **SUPPORTED.get(kind, {}), **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(0.2 * noise)
            else:
                parameter.add_(0.1 * noise)
    return model


def random_adapter(
    model: PreTrainedModel, *, rank: int, seed: int, leaves: Sequence[str] = ()
) -> AdapterWeights:
    """Both matrices random, on the linears with these leaf names, or on all; large enough that the
    logits move by tens of percent."""
    generator = torch.Generator().manual_seed(seed)
    return {
        path: LoraPair(
            a=torch.randn(rank, target.in_features, generator=generator) * 0.2,
            b=torch.randn(target.out_features, rank, generator=generator) * 0.2,
        )
        for path, target in find_targets(model).items()
        if not leaves or target.leaf in leaves
    }


def sequences_of(lengths: Sequence[int], *, seed: int) -> list[TokenSequence]:
    """Random tokens, every one of them trained on."""
    generator = np.random.default_rng(seed)
    rows = [generator.integers(3, VOCABULARY, length).astype(np.int32) for length in lengths]
    return [TokenSequence(ids, ids) for ids in rows]


def packed(
    shares: dict[str, list[TokenSequence]], *, padding: int = 3, loss_scale: float = 1.0
) -> PackedBatch:
    """The jobs' sequences one after another, with some padding behind them."""
    rows = sum(len(sequence) for sequences in shares.values() for sequence in sequences)
    return pack(
        [
            Share(job, sequences, [0] * len(sequences), [loss_scale] * len(sequences))
            for job, sequences in shares.items()
        ],
        rows + padding,
    )


def super_logits(model: SuperModel, batch: PackedBatch) -> dict[str, torch.Tensor]:
    """Per job, the logits of the rows that predict something."""
    with torch.no_grad(), model.routed(batch, train=False):
        logits = model.logits(batch)
    return {segment.job: logits[segment.targets] for segment in batch.segments}


def plain_logits(
    model: PreTrainedModel, weights: AdapterWeights, scale: float, sequences: list[TokenSequence]
) -> torch.Tensor:
    """The same by hooks, a sequence at a time, with the model's own attention; differentiable."""
    with plain_adapter(model, weights, scale):
        rows = [
            model(
                input_ids=torch.from_numpy(sequence.input_ids.astype(np.int64))[None],
                use_cache=False,
            ).logits[0, :-1]
            for sequence in sequences
        ]
    return torch.cat(rows)


def plain_gradients(
    model: PreTrainedModel, weights: AdapterWeights, scale: float, sequences: list[TokenSequence]
) -> dict[str, torch.Tensor]:
    """Of the summed loss, by `PATH.lora_A` and `PATH.lora_B` (transposed, as the pool keeps it)."""
    leaves = {
        path: LoraPair(a=pair.a.clone().requires_grad_(), b=pair.b.clone().requires_grad_())
        for path, pair in weights.items()
    }
    logits = plain_logits(model, leaves, scale, sequences)
    targets = np.concatenate([sequence.input_ids[1:] for sequence in sequences])
    F.cross_entropy(logits, torch.from_numpy(targets.astype(np.int64)), reduction="sum").backward()
    gradients = {}
    for path, pair in leaves.items():
        gradients[f"{path}.lora_A"] = pair.a.grad
        gradients[f"{path}.lora_B"] = pair.b.grad.T
    return gradients


def super_gradients(model: SuperModel, batch: PackedBatch) -> dict[str, dict[str, torch.Tensor]]:
    """Per job; what the pool has gathered is cleared before and copied after."""
    for job in model.jobs:
        for views in model.views(job).values():
            views.grad.zero_()
    with model.routed(batch, train=True):
        torch.autograd.backward(model.token_losses(batch), batch.loss_scales)
    return {
        job: {name: views.grad.clone() for name, views in model.views(job).items()}
        for job in model.jobs
    }


def largest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest value."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max())


def super_model(model: PreTrainedModel, **settings: object) -> SuperModel:
    """Over a copy: the model given stays as it is, to compare with."""
    return SuperModel(copy.deepcopy(model), **settings)


def job_spec(
    name: str = "a",
    *,
    r: int = 4,
    alpha: float = 8.0,
    targets: str | tuple[str, ...] = "all-linear",
    seed: int = 0,
    rslora: bool = False,
    init_from: str | None = None,
) -> JobSpec:
    return JobSpec(
        name=name,
        data=DataSpec(path="rows.jsonl"),
        lora=LoraSpec(r=r, lora_alpha=alpha, target_modules=targets, use_rslora=rslora),
        train=TrainSpec(seed=seed),
        init_from=init_from,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and three special ones; no training, no download."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>"]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate([*special, *alphabet])}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def save_base(
    directory: Path, kind: str = "llama", *, dtype: torch.dtype = torch.float32, **settings: object
) -> Path:
    """A checkpoint with weights and tokenizer, as a user would have it."""
    tokenizer = byte_tokenizer()
    settings = {"vocab_size": len(tokenizer), "max_position_embeddings": 128, **settings}
    tiny_model(kind, **settings).to(dtype).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
