"""PEFT adapter directories: written so that PEFT, vLLM and SGLang load them, read with suspicion.

A directory holds `adapter_config.json`, `adapter_model.safetensors`, `README.md` and nothing that a
loader could mistake for weights. Files from outside are checked (size, names, shapes, types) before
any tensor is read.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tlora.core.errors import AdapterError
from tlora.core.job import LoraSpec
from tlora.model.adapters import AdapterWeights, LoraPair
from tlora.model.targets import Target

PREFIX = "base_model.model."
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_HEADER_BYTES = 16 * 2**20
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
        tensors[f"{PREFIX}{path}.lora_A.weight"] = pair.a.contiguous()
        tensors[f"{PREFIX}{path}.lora_B.weight"] = pair.b.contiguous()
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
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
    name."""
    leaves = list(dict.fromkeys(targets[path].leaf for path in paths))
    reached = {path for path, target in targets.items() if target.leaf in leaves}
    return leaves if reached == set(paths) else list(paths)


def read_adapter(directory: Path, targets: dict[str, Target]) -> AdapterFile:
    """Read a PEFT LoRA directory for a model with these linears; AdapterError says what does not
    fit."""
    config = read_config(directory)
    path = directory / WEIGHTS
    if not path.is_file():
        raise AdapterError(f"{directory}: {WEIGHTS} is missing")
    _check_header(path)
    rank = _expect(config, "r", int, directory)
    alpha = _expect(config, "lora_alpha", (int, float), directory)
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
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise AdapterError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{path}: must hold an object")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: peft_type is {config.get('peft_type')!r}, not LORA")
    for name in (
        "use_dora",
        "modules_to_save",
        "rank_pattern",
        "alpha_pattern",
        "target_parameters",
    ):
        if config.get(name):
            raise AdapterError(f"{path}: {name} is not supported")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{path}: bias {config['bias']!r} is not supported")
    return config


def _expect(config, name, kind, directory: Path):
    value = config.get(name)
    if not isinstance(value, kind) or isinstance(value, bool) or value <= 0:
        raise AdapterError(f"{directory / CONFIG}: {name} must be a positive number, got {value!r}")
    return value


def _check_header(path: Path) -> None:
    """safetensors reads its header whole: look at its size first."""
    with path.open("rb") as file:
        prefix = file.read(8)
    if len(prefix) < 8:
        raise AdapterError(f"{path}: cut short")
    (size,) = struct.unpack("<Q", prefix)
    if size > min(MAX_HEADER_BYTES, path.stat().st_size):
        raise AdapterError(f"{path}: its header claims {size} bytes")


def _read_weights(path: Path, rank: int, targets: dict[str, Target]) -> AdapterWeights:
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            expected: dict[str, tuple[str, list[int]]] = {}
            for name in sorted(names):
                target, matrix = _target_of(name, path, targets)
                shape = [rank, target.in_features] if matrix == "A" else [target.out_features, rank]
                if file.get_slice(name).get_shape() != shape:
                    raise AdapterError(
                        f"{path}: {name} is {file.get_slice(name).get_shape()}, the base model "
                        f"and r={rank} need {shape}"
                    )
                expected[name] = (target.path, shape)
            modules = list(dict.fromkeys(module for module, _ in expected.values()))
            weights = {}
            for module in modules:
                pair = [f"{PREFIX}{module}.lora_{matrix}.weight" for matrix in "AB"]
                for name in pair:
                    if name not in names:
                        raise AdapterError(f"{path}: {name} is missing")
                a, b = (file.get_tensor(name) for name in pair)
                for name, tensor in zip(pair, (a, b), strict=True):
                    if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
                        raise AdapterError(
                            f"{path}: {name} holds values that are not finite numbers"
                        )
                weights[module] = LoraPair(a=a.float(), b=b.float())
    except AdapterError:
        raise
    except Exception as error:
        raise AdapterError(f"{path}: cannot be read: {error}") from None
    if not weights:
        raise AdapterError(f"{path}: holds no LoRA matrices")
    return weights


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
    vllm = (
        f"vllm serve {base_model} --enable-lora --max-lora-rank {max_rank} "
        f"--lora-modules {name}={directory}"
        if max_rank
        else f"(vLLM serves ranks up to {VLLM_RANKS[-1]}; this adapter has {rank})"
    )
    sglang = (
        f"python -m sglang.launch_server --model-path {base_model} --enable-lora "
        f"--max-lora-rank {rank} --lora-paths {name}={directory}"
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
