"""`python -m tlora.runtime.profiling` on a machine that has torch and transformers only."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from tlora.costs import read_profile
from tlora.runtime.profiling.settings import HELP, Settings
from tlora.training.sizing import CPU_BUCKET_STEP

ROOT = Path(__file__).parents[3]
# As if these were not installed.
WITHOUT = """
import runpy, sys
sys.modules.update(dict.fromkeys(["pydantic", "typer", "rich", "peft", "scipy"]))
runpy.run_module("tlora.runtime.profiling", run_name="__main__")
"""


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *args],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_it_runs_without_the_packages_of_the_command_line(tmp_path) -> None:
    """A plain table, and the file with the command that made it and the sizes that a CPU's engine
    pads to."""
    args = ("--shape", "demo", "--device", "cpu", "--tokens", "256", "--repeats", "1")
    done = run(*args, "--output", str(tmp_path / "p.json"))
    assert done.returncode == 0, done.stderr
    profile = read_profile(tmp_path / "p.json")
    assert profile.command and profile.command.startswith("python -m tlora.runtime.profiling")
    assert profile.bucket_step == CPU_BUCKET_STEP
    assert "Held-out error:" in done.stdout and "round 1 of 1" in done.stderr


def test_bad_input_is_one_message_and_exit_code_two(tmp_path) -> None:
    """As from the verb."""
    done = run("--shape", "llama-9b", "--output", str(tmp_path / "p.json"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: --shape: 'llama-9b' is neither") and done.stdout == ""


def test_every_option_has_a_help_text() -> None:
    """The verb and the module show the same."""
    assert set(HELP) == {field.name for field in fields(Settings)}
