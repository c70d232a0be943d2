"""Frozen linears that share an input, each with the adapters of many jobs. README.md has the
maths."""

from tlora.kernels.multi_lora.function import multi_lora
from tlora.kernels.multi_lora.pages import Ways
from tlora.kernels.multi_lora.routes import Group, Route, Routes, power_of_two
from tlora.kernels.multi_lora.tables import Segment, write_table

__all__ = [
    "Group",
    "Route",
    "Routes",
    "Segment",
    "Ways",
    "multi_lora",
    "power_of_two",
    "write_table",
]
