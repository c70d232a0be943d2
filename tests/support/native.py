"""The kernels in C of a CPU, which tests may not do without where CI is set."""

import os

import pytest

from tlora.kernels.multi_lora import native


def require_native() -> native.Native:
    found = native._native()
    if found is None:
        assert not os.environ.get("CI"), "make system-deps brings a C compiler"
        pytest.skip("no C compiler was found, so native.c cannot be compiled")
    return found
