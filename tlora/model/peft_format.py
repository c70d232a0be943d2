"""PEFT adapter directories: written so that PEFT, vLLM and SGLang load them, read with suspicion.

A directory holds `adapter_config.json`, `adapter_model.safetensors`, `README.md` and nothing that a
loader could mistake for weights. Files from outside are checked (size, names, shapes, types) before
any tensor is read.
"""

import json
import shlex
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from tlora.core.errors import AdapterError
from tlora.core.job import LoraSpec
from tlora.model.adapters import AdapterWeights, LoraPair
from tlora.model.targets import Target
from tlora.model.tensor_file import write_tensors

PREFIX = "base_model.model."
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 2**20
MAX_SETTING = 1e9
"""Beyond any rank or alpha there is; keeps NaN, infinity and endless numbers out."""

HEADER_BYTES = 2**16
HEADER_BYTES_PER_TENSOR = 200
"""Room in a header for metadata, and for a tensor besides its name."""

UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "velora_config",
    "monteclora_config",
    "kasa_config",
    "arrow_config",
)
"""Settings under which an adapter is more than its matrices A and B."""

PLAIN_STARTS = ("gaussian", "eva", "orthogonal")
"""Starts that leave the base model as it is; PiSSA and its like subtract from it."""

FLOATS = ("F64", "F32", "F16", "BF16")
LARGEST_FLOAT_BYTES = 8
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter as read from a directory."""

    weights: AdapterWeights
    scale: float
    base_model: str
    r: int


def export_adapter(
    directory: Path,
    weights: AdapterWeights,
    lora: LoraSpec,
    *,
    base_model: str,
    revision: str | None = None,
    targets: dict[str, Target],
) -> None:
    """Write a whole new directory. The caller moves it into place."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, pair in weights.items():
        tensors[f"{PREFIX}{path}.lora_A.weight"] = pair.a
        tensors[f"{PREFIX}{path}.lora_B.weight"] = pair.b
    write_tensors(directory / WEIGHTS, tensors, metadata={"format": "pt"})
    config = adapter_config(
        lora, list(weights), base_model=base_model, revision=revision, targets=targets
    )
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    (directory / "README.md").write_text(_card(config))


def adapter_config(
    lora: LoraSpec,
    paths: list[str],
    *,
    base_model: str,
    revision: str | None,
    targets: dict[str, Target],
) -> dict[str, object]:
    # rsLoRA is baked into alpha: SGLang ignores the flag.
    alpha = lora.lora_alpha * (lora.r**0.5 if lora.use_rslora else 1.0)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "revision": revision,
        "inference_mode": True,
        "r": lora.r,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": lora.lora_dropout,
        "bias": "none",
        "fan_in_fan_out": any(targets[path].transposed for path in paths),
        "target_modules": _module_names(paths, targets),
        "exclude_modules": None,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "target_parameters": None,
    }


def _module_names(paths: list[str], targets: dict[str, Target]) -> list[str]:
    """Leaf names where they say it all; whole paths where a job adapts only some modules of a
    name, or where it is a number, which every list of layers has too."""
    leaves = list(dict.fromkeys(targets[path].leaf for path in paths))
    reached = {path for path, target in targets.items() if target.leaf in leaves}
    ambiguous = any(leaf.isdecimal() for leaf in leaves)
    return leaves if reached == set(paths) and not ambiguous else list(paths)


def read_adapter(directory: Path, targets: dict[str, Target]) -> AdapterFile:
    """Read a PEFT LoRA directory for a model with these linears; AdapterError says what does not
    fit."""
    config = read_config(directory)
    path = directory / WEIGHTS
    if not path.is_file():
        raise AdapterError(f"{directory}: {WEIGHTS} is missing")
    rank = int(_expect(config, "r", directory, whole=True))
    alpha = _expect(config, "lora_alpha", directory, whole=False)
    _check_size(path, rank, targets)
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    weights = _read_weights(path, rank, targets)
    return AdapterFile(
        weights=weights,
        scale=scale,
        base_model=str(config.get("base_model_name_or_path") or ""),
        r=rank,
    )


def read_config(directory: Path) -> dict[str, object]:
    path = directory / CONFIG
    if not directory.is_dir():
        raise AdapterError(f"{directory}: no such adapter directory")
    if not path.is_file():
        raise AdapterError(f"{directory}: {CONFIG} is missing: not a PEFT adapter directory")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise AdapterError(f"{path}: larger than an adapter's configuration can be")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{path}: must hold an object")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: peft_type is {config.get('peft_type')!r}, not LORA")
    for name in UNSUPPORTED:
        if config.get(name):
            raise AdapterError(f"{path}: {name} is not supported")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{path}: bias {config['bias']!r} is not supported")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start not in PLAIN_STARTS:
        raise AdapterError(f"{path}: init_lora_weights {start!r} changes the base model")
    return config


def _expect(config: dict[str, object], name: str, directory: Path, *, whole: bool) -> float:
    value = config.get(name)
    kinds = (int,) if whole else (int, float)
    if isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < MAX_SETTING:
        return value
    what = "whole number" if whole else "number"
    raise AdapterError(f"{directory / CONFIG}: {name} must be a positive {what}, got {value!r}")


def _check_size(path: Path, rank: int, targets: dict[str, Target]) -> None:
    """safetensors reads its header whole and maps the whole file: look at both sizes first. An
    adapter of this model has at most two tensors per linear."""
    bytes_held = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
    if len(prefix) < 8:
        raise AdapterError(f"{path}: cut short")
    (header_bytes,) = struct.unpack("<Q", prefix)
    room = HEADER_BYTES + 2 * sum(HEADER_BYTES_PER_TENSOR + len(module) for module in targets)
    if header_bytes > min(room, bytes_held):
        raise AdapterError(f"{path}: its header claims {header_bytes} bytes")
    widths = sum(target.in_features + target.out_features for target in targets.values())
    if bytes_held > 8 + header_bytes + LARGEST_FLOAT_BYTES * rank * widths:
        raise AdapterError(f"{path}: {bytes_held} bytes are more than rank {rank} can need")


def _read_weights(path: Path, rank: int, targets: dict[str, Target]) -> AdapterWeights:
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            if not names:
                raise AdapterError(f"{path}: holds no LoRA matrices")
            found = {_check_tensor(file, name, path, rank, targets) for name in names}
            modules = [module for module in targets if module in found]
            return {module: _read_pair(file, names, module, path) for module in modules}
    except AdapterError:
        raise
    except Exception as error:
        # safetensors' own complaints have no common type but this.
        raise AdapterError(f"{path}: cannot be read: {error}") from None


def _check_tensor(file, name: str, path: Path, rank: int, targets: dict[str, Target]) -> str:
    """The module a tensor belongs to; looks at the header alone."""
    target, matrix = _target_of(name, path, targets)
    shape = [rank, target.in_features] if matrix == "A" else [target.out_features, rank]
    header = file.get_slice(name)
    if header.get_shape() != shape:
        raise AdapterError(
            f"{path}: {name} is {header.get_shape()}, the base model and r={rank} need {shape}"
        )
    if header.get_dtype() not in FLOATS:
        raise AdapterError(f"{path}: {name} is of type {header.get_dtype()}, not a float")
    return target.path


def _read_pair(file, names: list[str], module: str, path: Path) -> LoraPair:
    matrices = []
    for matrix in "AB":
        name = f"{PREFIX}{module}.lora_{matrix}.weight"
        if name not in names:
            raise AdapterError(f"{path}: {name} is missing")
        tensor = file.get_tensor(name).float()
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"{path}: {name} holds values that are not finite numbers")
        matrices.append(tensor)
    return LoraPair(a=matrices[0], b=matrices[1])


def _target_of(name: str, path: Path, targets: dict[str, Target]) -> tuple[Target, str]:
    for matrix in "AB":
        suffix = f".lora_{matrix}.weight"
        if name.startswith(PREFIX) and name.endswith(suffix):
            module = name[len(PREFIX) : -len(suffix)]
            if module in targets:
                return targets[module], matrix
            raise AdapterError(f"{path}: the base model has no linear {module}")
    raise AdapterError(f"{path}: unexpected tensor {name}")


def serving_commands(directory: Path, name: str, *, base_model: str, rank: int) -> list[str]:
    """How to serve the adapter with vLLM and with SGLang."""
    max_rank = next((limit for limit in VLLM_RANKS if limit >= rank), None)
    base_model, module = shlex.quote(base_model), shlex.quote(f"{name}={directory}")
    vllm = (
        f"vllm serve {base_model} --enable-lora --max-lora-rank {max_rank} --lora-modules {module}"
        if max_rank
        else f"(vLLM serves ranks up to {VLLM_RANKS[-1]}; this adapter has {rank})"
    )
    sglang = (
        f"python -m sglang.launch_server --model-path {base_model} --enable-lora "
        f"--max-lora-rank {rank} --lora-paths {module}"
    )
    return [vllm, sglang]


def _card(config: dict[str, object]) -> str:
    base = config["base_model_name_or_path"]
    modules = ", ".join(config["target_modules"])  # type: ignore[arg-type]
    return (
        f"---\nbase_model: {json.dumps(base)}\nlibrary_name: peft\ntags: [lora, tlora]\n---\n\n"
        f"# LoRA adapter\n\nRank {config['r']}, alpha {config['lora_alpha']}, on {modules} of "
        f"`{base}`.\n"
        "Trained with tlora. Load it with PEFT:\n\n"
        "```python\nfrom peft import PeftModel\n\n"
        'model = PeftModel.from_pretrained(base_model, "path/to/this/directory")\n```\n'
    )
