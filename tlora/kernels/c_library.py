"""A C file of this package as machine code: compiled once for this machine, by its own compiler,
and kept. Where that cannot be, whoever asks goes another way.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

FLAGS = ("-std=c11", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-fopenmp")
"""A product and a sum may be one instruction, which rounds once."""

HEADERS = Path(__file__).parent
"""Of all that is in C."""

TIMEOUT_S = 120

Fault = Callable[[ctypes.CDLL], str | None]
"""What is wrong with a library, if anything."""


class NoLibrary(Exception):
    """Why there is none."""


class NoPlace(NoLibrary):
    """None can be kept, or run, where it should be kept."""


class WrongLibrary(NoLibrary):
    """What was compiled does not do what it should."""


def load(source: Path, folder: Path | None, find_fault: Fault) -> ctypes.CDLL:
    """Kept in `folder`, if there is one, once it was seen to be right. Raises NoLibrary, whatever
    the reason."""
    if sys.platform != "linux":
        raise NoLibrary(f"there are no kernels in C for {sys.platform}")
    try:
        return _load(source, folder, find_fault)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        is_for_the_place = isinstance(error, OSError) and folder is not None
        raise (NoPlace if is_for_the_place else NoLibrary)(str(error)) from None


def _load(source: Path, folder: Path | None, find_fault: Fault) -> ctypes.CDLL:
    compiler = _compiler()
    if compiler is None:
        raise NoLibrary("no C compiler (cc, or what CC names) was found")
    threads = _openmp()
    if threads is None:
        raise NoLibrary("this build of torch has no libgomp")
    path = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{_key(source, compiler, threads)}.so"
        if _is_whole(path):
            return ctypes.CDLL(str(path))
    # Processes that begin together do each other no harm: the last one's file stays.
    with tempfile.TemporaryDirectory(dir=folder) as made:
        whole = _compile(source, compiler, threads, Path(made))
        library = ctypes.CDLL(str(whole))
        if fault := find_fault(library):
            raise WrongLibrary(fault)
        if path is not None:
            os.replace(whole, path)
    return library


def _compiler() -> tuple[str, ...] | None:
    """CC may have arguments, or a program before it."""
    name, *arguments = shlex.split(os.environ.get("CC") or "cc") or ["cc"]
    path = shutil.which(name)
    return (path, *arguments) if path else None


def _compile(source: Path, compiler: tuple[str, ...], threads: str, folder: Path) -> Path:
    part, whole = folder / "part.o", folder / "whole.so"
    _run(*compiler, *FLAGS, f"-I{HEADERS}", "-c", str(source), "-o", str(part))
    # With the threads that torch has, or there would be twice as many.
    _run(*compiler, "-shared", str(part), threads, "-lm", "-o", str(whole))
    # Before it is loaded: nobody may write to a file whose code runs.
    content = whole.read_bytes()
    whole.write_bytes(content + hashlib.sha256(content).digest())
    return whole


def _is_whole(path: Path) -> bool:
    """A library ends with a hash of what is before. One that lost its end to a full disk or a
    crash would end the process that loads it."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _run(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise NoLibrary(f"{command[0]}: {said[0]}")


def _key(source: Path, compiler: tuple[str, ...], threads: str) -> str:
    """A cache may be shared by machines with other instructions."""
    command = (os.path.realpath(compiler[0]), *compiler[1:])
    parts = (*FLAGS, *command, threads, platform.machine(), _instructions())
    found = hashlib.sha256(source.read_bytes())
    for header in sorted([*HEADERS.glob("*.h"), *source.parent.glob("*.h")]):
        found.update(b"\0" + header.read_bytes())
    for part in parts:
        found.update(b"\0" + part.encode())
    return found.hexdigest()[:24]


@functools.cache
def _instructions() -> str:
    """What /proc/cpuinfo says of the first processor's: flags on x86, Features on ARM."""
    lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _openmp() -> str | None:
    """The libgomp that torch has loaded: other packages bring theirs into the process too."""
    try:
        torchs = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        place = ctypes.cast(torchs.omp_get_max_threads, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return None
    path = _mapped_at(place, Path("/proc/self/maps").read_text("utf-8", "replace"))
    return path if path and "libgomp" in path else None


def _mapped_at(place: int, maps: str) -> str | None:
    """The file whose content is at an address of this process."""
    for line in maps.splitlines():
        span, _, _, _, _, *path = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= place < last:
            return path[0] if path else None
    return None
