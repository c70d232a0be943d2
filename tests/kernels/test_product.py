"""The product of `benchmarks/gpu_product.py` with the adapters' update in its loop, in Triton's
interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install '.[test]'")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_product.py"


@pytest.mark.parametrize("setting", ["loops 128x128 s4 e1", "flat 128x128 s3 e2 p2"])
def test_the_update_inside_the_product_is_that_of_each_job(setting: str) -> None:
    """Two stacked linears, one job or two in a block, S and adapters behind the columns or apart; a
    twin whose update is 3 % off is refused."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--trial", setting],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["ok"], result
    for direction in ("forward", "backward"):
        # Half precision rounds to 2e-4; the twin is 3 % / sqrt(2) off.
        assert result[direction]["plain"] < 1e-3
        for found in (result[direction], result[direction]["apart"]):
            assert found["error"] < 1e-3
            assert found["twin"] > 1.9e-2
