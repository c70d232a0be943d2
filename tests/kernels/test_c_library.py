"""A C file is compiled once, kept when it was seen to be right, and done without otherwise."""

import ctypes
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch  # noqa: F401 - its libgomp is linked with
from support.native import require_native

from tlora.kernels import c_library
from tlora.kernels.c_library import NoLibrary, NoPlace, WrongLibrary, load

SOURCE = """
#include <omp.h>
int answer(void) {
    int sum = 0;
#pragma omp parallel for reduction(+ : sum)
    for (int i = 0; i < 7; i++)
        sum += 6;
    return sum;
}
"""


@pytest.fixture(autouse=True)
def compiler() -> None:
    require_native()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kernels"


def fault(library: ctypes.CDLL) -> str | None:
    return None if library.answer() == 42 else f"{library.answer()} is no answer"


def kept(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_it_is_compiled_once(source: Path, folder: Path, monkeypatch) -> None:
    assert load(source, folder, fault).answer() == 42
    names = kept(folder)
    assert len(names) == 1 and names[0].endswith(".so")
    monkeypatch.setattr(c_library, "_run", lambda *command: pytest.fail("compiled again"))
    assert load(source, folder, lambda library: pytest.fail("tried again")).answer() == 42


@pytest.mark.parametrize(
    "change",
    [
        lambda m, source: source.write_text(SOURCE + "int other;\n"),
        lambda m, source: m.setattr(c_library, "_instructions", lambda: "flags: none"),
        lambda m, source: m.setattr(c_library, "FLAGS", (*c_library.FLAGS, "-O1")),
        lambda m, source: m.setenv("CC", shutil.which("c99") or shutil.which("c++")),
        lambda m, source: m.setenv("CC", "cc -O1"),
    ],
    ids=["source", "processor", "flags", "compiler", "arguments"],
)
def test_what_may_change_the_code_is_another_file(
    source: Path, folder: Path, monkeypatch, change
) -> None:
    """A cache may be on a disk that other machines share."""
    load(source, folder, fault)
    change(monkeypatch, source)
    compiler, threads = c_library._compiler(), c_library._openmp()
    assert compiler and threads
    assert f"{c_library._key(source, compiler, threads)}.so" not in kept(folder)


def test_a_header_is_a_part_of_it(source: Path, folder: Path) -> None:
    """Beside the source, or beside all of them."""
    header = source.parent / "answer.h"
    header.write_text("#define SIX 6\n")
    source.write_text('#include "answer.h"\n' + SOURCE.replace("+= 6", "+= SIX"))
    assert load(source, folder, fault).answer() == 42
    header.write_text("#define SIX 5\n")
    with pytest.raises(WrongLibrary):
        load(source, folder, fault)


def test_a_compiler_may_have_arguments_and_a_program_before_it(
    source: Path, folder: Path, monkeypatch
) -> None:
    monkeypatch.setenv("CC", "env cc -pipe")
    assert load(source, folder, fault).answer() == 42


def in_another_process(program: str, *arguments: Path) -> str:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


LOST_ENDS = """
import sys
import tempfile
from pathlib import Path
from tlora.kernels.c_library import load
source, folder = map(Path, sys.argv[1:])
(path,) = folder.iterdir()
whole = path.read_bytes()
for size in (0, 100, 5000, 10000, len(whole) - 1):
    path.unlink()
    path.write_bytes(whole[:size])
    print(load(source, folder, lambda library: None).answer(), path.read_bytes() == whole)
"""


def test_a_file_that_lost_its_end_is_made_again(source: Path, folder: Path) -> None:
    """To a full disk or a crash. Code that is missing would end the process with a bus error."""
    load(source, folder, fault)
    assert in_another_process(LOST_ENDS, source, folder) == "42 True\n" * 5


def test_what_is_wrong_is_not_kept(source: Path, folder: Path) -> None:
    source.write_text(SOURCE.replace("+= 6", "+= 5"))
    with pytest.raises(WrongLibrary, match=r"^35 is no answer$"):
        load(source, folder, fault)
    assert kept(folder) == []


def test_the_compiler_says_why(source: Path, folder: Path) -> None:
    source.write_text("int answer(void) { return x; }")
    with pytest.raises(NoLibrary, match=r"error|answer"):
        load(source, folder, fault)
    assert kept(folder) == []


def no_proc(path: Path, *format: str) -> str:
    raise FileNotFoundError(f"no {path}")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.setenv("CC", "no-such-compiler"), "no C compiler"),
        (lambda m: m.setenv("CC", "cc '-pipe"), "No closing quotation"),
        (lambda m: m.setattr(c_library, "_openmp", lambda: None), "no libgomp"),
        (lambda m: m.setattr(c_library.Path, "read_text", no_proc), "no /proc"),
        (lambda m: m.setattr(c_library.sys, "platform", "darwin"), "for darwin"),
        (lambda m: m.setattr(c_library, "TIMEOUT_S", 1e-6), "timed out"),
    ],
)
def test_without_what_it_needs_there_is_none(
    source: Path, folder: Path, monkeypatch, change, reason: str
) -> None:
    change(monkeypatch)
    with pytest.raises(NoLibrary, match=reason):
        load(source, folder, fault)


def test_a_folder_that_cannot_be_written_is_no_place(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NoPlace, match="file"):
        load(source, tmp_path / "file" / "kernels", fault)


def test_a_folder_that_runs_no_code_is_no_place(source: Path, folder: Path, monkeypatch) -> None:
    """Mounted so that nothing in it may run."""
    load(source, folder, fault)

    def refused(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    threads = c_library._openmp()
    monkeypatch.setattr(c_library, "_openmp", lambda: threads)
    monkeypatch.setattr(c_library.ctypes, "CDLL", refused)
    with pytest.raises(NoPlace, match="failed to map"):
        load(source, folder, fault)


def test_without_a_folder_it_is_for_this_process(source: Path) -> None:
    assert load(source, None, fault).answer() == 42
    source.write_text(SOURCE.replace("+= 6", "+= 5"))
    with pytest.raises(WrongLibrary):
        load(source, None, fault)


TWO = """
import ctypes, sys
from tlora.kernels import c_library
alone = c_library._openmp()
ctypes.CDLL(sys.argv[1])
assert sys.argv[1] in open("/proc/self/maps").read()
print(c_library._openmp() == alone)
"""


def test_the_libgomp_of_others_is_passed_over() -> None:
    """scikit-learn brings one."""
    torchs = c_library._openmp()
    assert torchs
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="libgomp-") as other:
        shutil.copy(torchs, other.name)
        assert in_another_process(TWO, Path(other.name)) == "True\n"


def test_the_one_at_an_address_is_taken_whatever_its_name_and_place() -> None:
    maps = """\
55d0c000-55d0d000 r--p 00000000 08:01 11 /a place/libgomp-before.so.1
55d0d000-55d0f000 r-xp 00001000 08:01 11 /a place/libgomp-before.so.1
55d0f000-55d10000 rw-p 00000000 00:00 0
7f3a1000-7f3a2000 r--p 00000000 08:01 12 /b place/libgomp.so.1
7f3a2000-7f3a4000 r-xp 00001000 08:01 12 /b place/libgomp.so.1
7f3b0000-7f3b1000 r-xp 00000000 08:01 13 /c/libgomp-after.so.1
"""
    assert c_library._mapped_at(0x7F3A2000, maps) == "/b place/libgomp.so.1"
    assert c_library._mapped_at(0x55D0EFFF, maps) == "/a place/libgomp-before.so.1"
    assert c_library._mapped_at(0x7F3B0100, maps) == "/c/libgomp-after.so.1"
    for nobodys in (0x55D0F010, 0x7F3A4000, 0x1000):
        assert c_library._mapped_at(nobodys, maps) is None


def test_it_runs_on_the_threads_of_torch(source: Path, folder: Path) -> None:
    """A second libgomp would have threads of its own, and both would want every core."""
    load(source, folder, fault)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert len({line.split()[-1] for line in maps if "/libgomp" in line}) == 1
