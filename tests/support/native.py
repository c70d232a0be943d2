"""The kernels in C of a CPU, which tests may not do without where CI is set."""

import ctypes
import os
import platform
from pathlib import Path

import pytest

from tlora.kernels import c_library
from tlora.kernels.attention import native as attention
from tlora.kernels.multi_lora import native

HEADER = "products.h"


def require_native() -> native.Native:
    return _required(native._native())


def require_native_attention() -> attention.Native:
    return _required(attention._native())


def _required(found):
    if found is None:
        assert not os.environ.get("CI"), "make system-deps brings a C compiler"
        pytest.skip("no C compiler was found, so native.c cannot be compiled")
    return found


def with_fewer_instructions(test):
    """Calls it with `flags`, some of which leave instructions out."""
    x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="these flags are for x86")
    fewer = [("-mno-avx512f",), ("-mno-avx512f", "-mno-avx2", "-mno-fma"), ("-O0",)]
    return x86(pytest.mark.parametrize("flags", fewer)(test))


def build(source: Path, folder: Path, monkeypatch, *flags: str) -> ctypes.CDLL:
    """Compiled with more flags than usual."""
    monkeypatch.setattr(c_library, "FLAGS", (*c_library.FLAGS, *flags))
    return c_library.load(source, folder / "kept", lambda library: None)


def build_mutant(source: Path, old: str, new: str, folder: Path, monkeypatch) -> ctypes.CDLL:
    """Of the source, or of the header that it shares."""
    texts = {path.name: path.read_text() for path in (source, c_library.HEADERS / HEADER)}
    assert sum(text.count(old) for text in texts.values()) == 1, "the mutant is of other code"
    for name, text in texts.items():
        (folder / name).write_text(text.replace(old, new))
    # Quick to compile.
    return build(folder / source.name, folder, monkeypatch, "-O1")
