"""`python -m tlora.runtime.benchmark` on a machine that has torch and transformers only."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# As if these were not installed.
WITHOUT = """
import runpy, sys
sys.modules.update(dict.fromkeys(["pydantic", "typer", "rich", "peft"]))
runpy.run_module("tlora.runtime.benchmark", run_name="__main__")
"""


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *args],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_it_runs_without_the_packages_of_the_command_line_and_without_peft() -> None:
    """A plain table and the line; PEFT's row is left out, and that is said."""
    done = run(
        *("--shape", "demo", "--device", "cpu", "--jobs", "2", "--ranks", "2", "--batch", "1,2"),
        *("--lengths", "9", "--steps", "1", "--repeats", "1", "--skip-compile"),
    )
    assert done.returncode == 0, done.stderr
    *shown, line = done.stdout.splitlines()
    found = json.loads(line)
    assert found["settings"]["batch"] == [1, 2] and found["settings"]["lengths"] == "9"
    assert found["peft_one_by_one"] == {"tokens_per_s": None} and found["ratio_peft"] is None
    assert found["fused"]["tokens_per_s"] > 0
    assert not any(row.startswith("PEFT one by one") for row in shown)
    assert "PEFT is not installed" in " ".join(shown)
    assert "round 1 of 1: fused" in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ranks", "0"], "error: --ranks: must be at least 1, got 0"),
        (["--ranks", "0", "--ranks", "4"], "error: --ranks: must be at least 1, got 0"),
        (["--lengths", "512", "--shape", "demo"], "error: --lengths: 512 tokens are more than"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_two(args: list[str], message: str) -> None:
    """As from the verb."""
    done = run("--device", "cpu", *args)
    assert done.returncode == 2
    assert done.stderr.startswith(message) and done.stdout == ""
