"""The tests of the kernels under NVIDIA's compute-sanitizer: nothing is read or written that is not
theirs, and no two threads meet in shared memory without a barrier.

    python -m pytest tests/gpu/test_sanitizer.py -n 8

What the kernels compute is small there; their results are checked too, by their own tests.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TOOL = shutil.which("compute-sanitizer")
ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "tests" / "kernels"
FILES = sorted(str(path.relative_to(ROOT)) for path in KERNELS.glob("*/test_triton*.py"))
LIMIT_S = 500
"""Of a file. Whatever is launched is watched instruction by instruction."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not installed"),
]

BEYOND = """
import torch, triton, triton.language as tl

@triton.jit
def store(p, at):
    tl.store(p + at + tl.arange(0, 32), 1)

x = torch.zeros(64, dtype=torch.int32, device="cuda")
store[(1,)](x, {at})
torch.cuda.synchronize()
"""


def watched(tool: str, *command: str) -> tuple[int, str]:
    """The exit code, and what the sanitizer and the program said. Every tensor has memory of its
    own: beyond one that shares a block with others would be somebody's."""
    assert TOOL is not None
    options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]
    done = subprocess.run(
        [TOOL, *options, sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_kernels_tests_are_clean(tool: str, file: str) -> None:
    code, said = watched(tool, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file)
    assert code == 0, said[-6000:]
    assert re.search(r"^\d+ passed", said, re.MULTILINE), said[-2000:]
    # Of racecheck "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)".
    assert re.search(r"SUMMARY: 0 (errors|hazards)", said), said[-2000:]


@pytest.mark.parametrize(("at", "is_clean"), [(32, True), (48, False)])
def test_a_store_beyond_a_tensor_is_seen(tmp_path: Path, at: int, is_clean: bool) -> None:
    """The twin: else being clean would say nothing."""
    script = tmp_path / "beyond.py"
    script.write_text(BEYOND.format(at=at))
    code, said = watched("memcheck", str(script))
    assert (code == 0) == is_clean, said[-2000:]
    assert ("Invalid __global__ write" in said) != is_clean, said[-2000:]
