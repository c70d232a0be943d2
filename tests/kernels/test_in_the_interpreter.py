"""The tests of the Triton kernels run where there is no GPU too: in Triton's interpreter."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.interpreter import KERNELS_RUN

FOLDER = Path(__file__).parent
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/test_triton*.py"))


@pytest.mark.skipif(KERNELS_RUN, reason="the kernels run in this process")
@pytest.mark.parametrize("file", FILES)
def test_kernels_pass_in_the_interpreter(file: str):
    """Every test of the file, in a process of its own; none may be skipped there."""
    if importlib.util.find_spec("triton") is None and not os.environ.get("CI"):
        pytest.skip("Triton is not installed: pip install '.[test]' on Linux x86-64")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, str(FOLDER / file)],
        cwd=FOLDER.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert re.search(r"^\d+ passed(, \d+ warnings?)? in ", run.stdout, re.MULTILINE), run.stdout


def test_this_process_has_no_interpreter():
    """The other tests train with the kernels of the CPU, not with interpreted ones."""
    assert FILES
    assert KERNELS_RUN or "TRITON_INTERPRET" not in os.environ
