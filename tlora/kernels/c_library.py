"""A C file of this package as machine code: compiled once for this machine, by its own compiler,
and kept. Where that cannot be, whoever asks goes another way.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

FLAGS = ("-std=c11", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-fopenmp")
"""A product and a sum are one instruction wherever the machine has it, so that all parts of a
kernel round alike."""

TIMEOUT_S = 120


Fault = Callable[[ctypes.CDLL], str | None]
"""What is wrong with a library, if anything."""


class NoLibrary(Exception):
    """Why there is none."""


class WrongLibrary(NoLibrary):
    """What was compiled does not do what it should."""


def load(source: Path, folder: Path, find_fault: Fault) -> ctypes.CDLL:
    """Kept in `folder` once it was seen to be right. Raises NoLibrary, whatever the reason."""
    if sys.platform != "linux":
        raise NoLibrary(f"there are no kernels in C for {sys.platform}")
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise NoLibrary("no C compiler (cc, or what CC names) was found")
    threads = _openmp()
    if threads is None:
        raise NoLibrary("this build of torch has no libgomp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{_key(source, compiler, threads)}.so"
        if path.exists():
            return ctypes.CDLL(str(path))
        # Processes that begin together do each other no harm: the last one's file stays.
        with tempfile.TemporaryDirectory(dir=folder) as made:
            whole = _compile(source, compiler, threads, Path(made))
            library = ctypes.CDLL(str(whole))
            if fault := find_fault(library):
                raise WrongLibrary(fault)
            os.replace(whole, path)
        return library
    except (OSError, subprocess.SubprocessError) as error:
        raise NoLibrary(str(error)) from None


def _compile(source: Path, compiler: str, threads: str, folder: Path) -> Path:
    part, whole = folder / "part.o", folder / "whole.so"
    _run(compiler, *FLAGS, "-c", str(source), "-o", str(part))
    # With the threads that torch has, or there would be twice as many.
    _run(compiler, "-shared", str(part), threads, "-o", str(whole))
    return whole


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise NoLibrary(f"{command[0]}: {said[0]}")


def _key(source: Path, compiler: str, threads: str) -> str:
    """A cache may be shared by machines with other instructions."""
    parts = (*FLAGS, os.path.realpath(compiler), threads, platform.machine(), _instructions())
    found = hashlib.sha256(source.read_bytes())
    for part in parts:
        found.update(b"\0" + part.encode())
    return found.hexdigest()[:24]


@functools.cache
def _instructions() -> str:
    """What /proc/cpuinfo says of the first processor's: flags on x86, Features on ARM."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _openmp() -> str | None:
    """The libgomp of this process, which torch has loaded."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libgomp" in line}
    return min(paths, default=None)
