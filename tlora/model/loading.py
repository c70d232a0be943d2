"""Finding and loading the base model, or only its shape, with errors that say what to do."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tlora.core.errors import ModelError
from tlora.core.job import BaseSpec

KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ModelError(
            f"engine.device: '{device}' is not a device; use auto, cpu or cuda"
        ) from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("engine.device: cuda was asked for, but torch sees no CUDA device here")
    return resolved


def load_config(base: BaseSpec):
    """The model's configuration, checked for attention that packing cannot honour."""
    config = _from_pretrained(base, AutoConfig.from_pretrained)
    unknown = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYER_TYPES
    if unknown:
        raise ModelError(
            f"base.model: {config.model_type} has layers of type {', '.join(sorted(unknown))}, "
            "which cannot be trained in packed rows"
        )
    return config


def load_shape(base: BaseSpec) -> PreTrainedModel:
    """The model without its weights: enough to check targets and ranks."""
    config = load_config(base)
    with torch.device("meta"):
        return _causal_lm(base, config)


def load_base(base: BaseSpec, device: torch.device) -> PreTrainedModel:
    """The model with its weights, in safetensors only: other formats run code when they are
    read."""
    load_config(base)
    dtype = "auto" if base.dtype == "auto" else getattr(torch, base.dtype)
    model = _from_pretrained(
        base, AutoModelForCausalLM.from_pretrained, dtype=dtype, use_safetensors=True
    )
    return model.to(device)


def load_tokenizer(base: BaseSpec) -> PreTrainedTokenizerBase:
    return _from_pretrained(base, AutoTokenizer.from_pretrained)


def _causal_lm(base: BaseSpec, config) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ModelError(
            f"base.model: '{base.model}' is no causal language model: {error}"
        ) from None


def _from_pretrained(base: BaseSpec, load, **settings):
    path = Path(base.model).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"base.model: {path} holds no config.json: not a Hugging Face checkpoint")
    try:
        return load(str(path) if path.is_dir() else base.model, revision=base.revision, **settings)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if path.is_dir():
            raise ModelError(f"base.model: {path} cannot be loaded: {reason}") from error
        raise ModelError(
            f"base.model: '{base.model}' is neither a directory here nor a model that can be had "
            f"from the Hub: {reason}"
        ) from error
