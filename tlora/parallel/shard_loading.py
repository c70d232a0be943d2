"""A base model that no rank ever holds in full: made without weights, laid over the ranks, and each
rank's part of every weight read from the checkpoint's files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from tlora.core.errors import ModelError
from tlora.core.job import BaseSpec
from tlora.model.loading import load_config, load_shape
from tlora.parallel.counting import Counts
from tlora.parallel.sharding import Sharded

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def load_sharded(
    base: BaseSpec, device: torch.device, mesh: DeviceMesh, *, counts: Counts, kept_layers: int = 0
) -> tuple[PreTrainedModel, Sharded]:
    """The model with this rank's shards of its weights. All ranks must call this."""
    directory = Path(base.model).expanduser()
    if not directory.is_dir():
        raise ModelError(
            f"base.model: '{base.model}' is no directory here, and shards are read from files; "
            "download it first, or use a plan with fsdp: 1"
        )
    files = _files_of(directory)
    model = load_shape(base)
    dtype = _dtype(base, load_config(base))
    for parameter in model.parameters():
        # Not of buffers: rotary frequencies stay in float32.
        parameter.data = parameter.data.to(dtype)
    sharded = Sharded(model, mesh, counts=counts, kept_layers=kept_layers)
    # FSDP2 has made every parameter a DTensor without memory; now each gets what is its own.
    model.to_empty(device=device)
    _fill_buffers(model)
    _fill_parameters(model, files)
    return model.eval(), sharded


def _files_of(directory: Path) -> dict[str, Path]:
    """The file of each weight, by the weight's name."""
    try:
        if (directory / INDEX).is_file():
            weights = json.loads((directory / INDEX).read_text())["weight_map"]
            return {name: directory / Path(file).name for name, file in weights.items()}
        with safe_open(directory / SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), directory / SINGLE)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"base.model: the weights in {directory} cannot be read: {error}"
        ) from error


def _dtype(base: BaseSpec, config: PretrainedConfig) -> torch.dtype:
    if base.dtype != "auto":
        return getattr(torch, base.dtype)
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


@torch.no_grad()
def _fill_buffers(model: PreTrainedModel) -> None:
    """Most are in no file: the model computes them, each as it does when it is made."""
    for module in model.modules():
        if any(True for _ in module.buffers(recurse=False)):
            for _, buffer in module.named_buffers(recurse=False):
                buffer.fill_(torch.nan if buffer.is_floating_point() else 0)
            model._init_weights(module)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and not buffer.isfinite().all():
                    raise ModelError(
                        f"base.model: {type(model).__name__} does not say how to make its {name}, "
                        "and cannot be loaded in shards; use a plan with fsdp: 1"
                    )


@torch.no_grad()
def _fill_parameters(model: PreTrainedModel, files: dict[str, Path]) -> None:
    by_file: dict[Path, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in [*model.named_parameters(), *_saved_buffers(model)]:
        if name not in files:
            raise ModelError(
                f"base.model: {model.config._name_or_path or 'the checkpoint'} has no weight named "
                f"{name}, and one under another name is not looked for when it is loaded in "
                "shards; save it again with this version of transformers"
            )
        by_file.setdefault(files[name], []).append((name, parameter))
    for path, parameters in by_file.items():
        with safe_open(path, framework="pt") as file:
            for name, parameter in parameters:
                _fill(name, parameter, file.get_slice(name))


def _saved_buffers(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """A correction of a router, say: what it is made with is not what was learnt."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _fill(name: str, parameter: torch.Tensor, stored: Any) -> None:
    """`stored` is read where it is sliced, and nowhere else."""
    if list(parameter.shape) != list(stored.get_shape()):
        raise ModelError(
            f"base.model: its weight {name} is {stored.get_shape()}, and config.json says "
            f"{list(parameter.shape)}"
        )
    if not isinstance(parameter, DTensor):
        parameter.copy_(stored[:])
        return
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if all(shape):
        places = tuple(
            slice(first, first + size) for first, size in zip(offset, shape, strict=True)
        )
        parameter.to_local().copy_(stored[places])
