"""Finding and loading the base model, or only its shape, with errors that say what to do."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tlora.core.errors import ModelError
from tlora.core.job import BaseSpec
from tlora.model.memory import is_out_of_memory
from tlora.model.probe import check_layer_types
from tlora.model.quantising import quantise_linears

UNREAD = ("bitsandbytes", "gptq", "awq")
"""Of checkpoints whose weights are in fewer bits already: linears that are no longer such, and can
carry no adapter."""


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


def launch_on(device: torch.device) -> None:
    """Triton launches kernels on this thread's own GPU, wherever their tensors are."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def load_config(base: BaseSpec) -> PretrainedConfig:
    """The model's configuration, checked for attention that packing cannot honour and for weights
    that are not read."""
    config = _from_pretrained(base, AutoConfig.from_pretrained)
    check_layer_types(config)
    held = getattr(config, "quantization_config", None) or {}
    # bitsandbytes once wrote no method.
    method = held.get("quant_method", UNREAD[0]) if held else None
    if method in UNREAD:
        raise _quantised_already(base, str(method))
    return config


def _quantised_already(base: BaseSpec, method: str) -> ModelError:
    return ModelError(
        f"base.model: the weights of {base.model} are quantised already ({method}); name the "
        "checkpoint in 16 or 32 bits that they were made from, and base.quantization for fewer bits"
    )


def load_shape(base: BaseSpec) -> PreTrainedModel:
    """The model without its weights: enough to check targets and ranks."""
    config = load_config(base)
    with torch.device("meta"):
        return _causal_lm(base, config)


def context_length(config: PretrainedConfig) -> int | None:
    """The longest row. None where there is no limit; a model without one may say -1."""
    text = config.get_text_config(decoder=True)
    length = getattr(text, "max_position_embeddings", None)
    return length if length is not None and length > 0 else None


def load_base(base: BaseSpec, device: torch.device) -> PreTrainedModel:
    """The model with its weights, in safetensors only: other formats run code when read. Linears
    are quantised if that is asked for."""
    load_config(base)
    launch_on(device)
    dtype = "auto" if base.dtype == "auto" else getattr(torch, base.dtype)
    model, report = _from_pretrained(
        base,
        AutoModelForCausalLM.from_pretrained,
        dtype=dtype,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    # transformers would make these up at random and go on.
    wrong = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    if wrong:
        raise ModelError(
            f"base.model: {base.model} lacks {len(wrong)} weights or has them in another "
            f"shape than its config.json says; the first is {min(wrong)}"
        )
    if base.quantization != "none":
        # Left so by transformers, which unpacks others as it reads them.
        if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
            raise _quantised_already(base, str(quantizer.quantization_config.quant_method))
        quantise_linears(model, base.quantization, device)
    return model.to(device)


def load_tokenizer(base: BaseSpec) -> PreTrainedTokenizerBase:
    return _from_pretrained(base, AutoTokenizer.from_pretrained, what="tokenizer")


def _causal_lm(base: BaseSpec, config: PretrainedConfig) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_config(config)
    except Exception as error:
        # No causal model, a configuration of several models, values that do not go together, or a
        # part that needs a library which is not here.
        raise ModelError(
            f"base.model: the {config.model_type} in '{base.model}' cannot be made as a causal "
            f"language model: {_in_one_line(error)}"
        ) from error


def _from_pretrained(base: BaseSpec, load: Callable, *, what: str = "model", **settings: object):
    path = Path(base.model).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"base.model: {path} holds no config.json: not a Hugging Face checkpoint")
    name = str(path) if path.is_dir() else base.model
    try:
        return load(name, revision=base.revision, trust_remote_code=False, **settings)
    except Exception as error:
        if is_out_of_memory(error):
            raise ModelError(f"base.model: too little memory to load {name}: {error}") from error
        # A checkpoint can be wrong in as many ways as there are types: values of the configuration,
        # damaged weights, shapes, a file that cannot be had.
        reason = _in_one_line(error)
        if path.is_dir():
            raise ModelError(
                f"base.model: the {what} in {path} cannot be loaded: {reason}"
            ) from error
        raise ModelError(
            f"base.model: '{base.model}' is neither a directory here nor a {what} that can be had "
            f"from the Hub: {reason}"
        ) from error


def _in_one_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    if isinstance(error, KeyError):
        # Of the name of an activation, say, in a table of all.
        text = f"{text} is not known"
    first, *others = [line.strip() for line in text.splitlines()]
    # A heading alone does not say what is wrong.
    return f"{first} {others[0]}" if first.endswith(":") and others else first.rstrip(" :")
