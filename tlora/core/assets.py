"""What comes with the package."""

from pathlib import Path

DEMO = Path(__file__).parents[1] / "assets" / "demo"
"""A tiny base model (base/), small datasets (data/) and a job file over them (jobs.yaml)."""

REPORT = Path(__file__).parents[1] / "assets" / "report"
"""Template, style and scripts of a run's report."""

BENCH = Path(__file__).parents[1] / "assets" / "bench"
"""Sequence lengths for `tlora bench`: one number per line."""

SIMULATION = Path(__file__).parents[1] / "assets" / "simulation"
"""A small trace for `tlora simulate`, and the template and script of its report."""

SWEEP = Path(__file__).parents[1] / "assets" / "sweep"
"""Template, style and script of a sweep's report."""
