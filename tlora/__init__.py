"""Many LoRA jobs, one frozen backbone, each trained exactly as it would train alone."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tlora.config import load_spec
    from tlora.core.job import JobSpec, RunSpec
    from tlora.kernels.multi_lora import multi_lora
    from tlora.model.peft_format import export_adapter
    from tlora.model.super_model import SuperModel
    from tlora.runtime.training import RunResult, train
    from tlora.simulation.run import simulate
    from tlora.training.engine import Engine

__version__ = "0.1.0"

# Loaded when first asked for: the command line must answer before torch has been imported.
_HOMES = {
    "Engine": "tlora.training.engine",
    "JobSpec": "tlora.core.job",
    "RunResult": "tlora.runtime.training",
    "RunSpec": "tlora.core.job",
    "SuperModel": "tlora.model.super_model",
    "export_adapter": "tlora.model.peft_format",
    "load_spec": "tlora.config",
    "multi_lora": "tlora.kernels.multi_lora",
    "simulate": "tlora.simulation.run",
    "train": "tlora.runtime.training",
}

__all__ = [
    "Engine",
    "JobSpec",
    "RunResult",
    "RunSpec",
    "SuperModel",
    "export_adapter",
    "load_spec",
    "multi_lora",
    "simulate",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tlora' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
