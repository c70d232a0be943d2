"""Stub."""

from pathlib import Path


def write_sweep_report(root: Path) -> Path:
    return root
