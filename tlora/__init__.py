"""Many LoRA jobs, one frozen backbone, each trained exactly as it would train alone."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tlora.config import load_spec, load_sweep, load_tasks
    from tlora.core.job import JobSpec, RunSpec
    from tlora.core.plan import Plan
    from tlora.core.sweep import SweepSpec
    from tlora.kernels.multi_lora import multi_lora
    from tlora.model.peft_format import export_adapter
    from tlora.model.super_model import SuperModel
    from tlora.runtime.sweeps.tasks import tune_on_devices
    from tlora.runtime.sweeps.tune import tune
    from tlora.runtime.training import RunResult, train
    from tlora.simulation.run import simulate
    from tlora.training.engine import Engine
    from tlora.tuning.results import Study

__version__ = "0.1.0"

# Loaded when first asked for: the command line must answer before torch has been imported.
_HOMES = {
    "Engine": "tlora.training.engine",
    "JobSpec": "tlora.core.job",
    "Plan": "tlora.core.plan",
    "RunResult": "tlora.runtime.training",
    "RunSpec": "tlora.core.job",
    "Study": "tlora.tuning.results",
    "SuperModel": "tlora.model.super_model",
    "SweepSpec": "tlora.core.sweep",
    "export_adapter": "tlora.model.peft_format",
    "load_spec": "tlora.config",
    "load_sweep": "tlora.config",
    "load_tasks": "tlora.config",
    "multi_lora": "tlora.kernels.multi_lora",
    "simulate": "tlora.simulation.run",
    "train": "tlora.runtime.training",
    "tune": "tlora.runtime.sweeps.tune",
    "tune_on_devices": "tlora.runtime.sweeps.tasks",
}

__all__ = [
    "Engine",
    "JobSpec",
    "Plan",
    "RunResult",
    "RunSpec",
    "Study",
    "SuperModel",
    "SweepSpec",
    "export_adapter",
    "load_spec",
    "load_sweep",
    "load_tasks",
    "multi_lora",
    "simulate",
    "train",
    "tune",
    "tune_on_devices",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tlora' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
