"""Where the Triton kernels are tested: on a GPU, or on the CPU in Triton's interpreter.

The interpreter must be chosen before Triton is imported, and the engine sees the choice too
(`triton_serves`), so without a GPU tests/kernels/test_in_the_interpreter.py runs those files in
processes of their own. bf16 is for the GPU alone: the interpreter's bf16 dot is wrong.
"""

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS_RUN = ON_GPU or INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if ON_GPU else [])

runs_kernels = pytest.mark.skipif(
    not KERNELS_RUN, reason="run by test_in_the_interpreter.py, in a process of its own"
)
