"""Where the Triton kernels are tested: on a GPU, or on the CPU in Triton's interpreter.

The interpreter must be chosen before Triton is imported, and the engine sees the choice too
(`triton_serves`), so without a GPU tests/kernels/test_in_the_interpreter.py runs those files in
processes of their own. bf16 is for the GPU alone: the interpreter's bf16 dot is wrong.

On a GPU every run draws inputs of its own; in the interpreter they are the same every time.
TLORA_TEST_SEED chooses them, and a run says which it had.
"""

import os
import secrets

import pytest
import torch

ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS_RUN = ON_GPU or INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if ON_GPU else [])

if ON_GPU and "TLORA_TEST_SEED" not in os.environ:
    # Here, so that processes started by this one have the same.
    os.environ["TLORA_TEST_SEED"] = str(secrets.randbelow(2**31))
SEED = int(os.environ.get("TLORA_TEST_SEED", "0"))
"""Added to the seeds of the kernels' tests."""

runs_kernels = pytest.mark.skipif(
    not KERNELS_RUN, reason="run by test_in_the_interpreter.py, in a process of its own"
)
