"""Job files: read, checked, merged, printed. No torch; nothing here knows how a job is trained."""

from tlora.config.dumping import changed_fields, dump_spec, resolved
from tlora.config.loading import load_spec
from tlora.config.plans import dump_plan, load_plan
from tlora.config.schema import json_schema
from tlora.config.sweep_schema import sweep_schema
from tlora.config.sweeps import load_sweep
from tlora.config.tasks import load_tasks

__all__ = [
    "changed_fields",
    "dump_plan",
    "dump_spec",
    "json_schema",
    "load_plan",
    "load_spec",
    "load_sweep",
    "load_tasks",
    "resolved",
    "sweep_schema",
]
