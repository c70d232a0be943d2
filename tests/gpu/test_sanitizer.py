"""The tests of the kernels under NVIDIA's compute-sanitizer: nothing is read or written that is not
theirs, and no two threads meet in shared memory without a barrier.

    python -m pytest tests/gpu/test_sanitizer.py -n 12

A kernel that is watched takes ten to fifty times as long, so these are a choice of small cases,
every kernel and every way through it among them. Each part runs without the tool first, which
compiles, and then under both tools side by side. Only kernels are watched whose names are not
mangled: those of C++ are torch's. What the kernels compute is checked too, by the tests themselves.
"""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from support.interpreter import ON_GPU

NAME = "compute-sanitizer"
ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "tests" / "kernels"
LIMIT_S = 150
"""Of a part under a tool."""

TOOLS = ("memcheck", "racecheck")
HALF = "torch.bfloat16" if ON_GPU else "torch.float16"
LORA = "multi_lora/test_triton"
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "adapters, half precision": (
        f"{LORA}.py",
        (
            f"*output_and_gradients_match*odd ranks*{HALF}]",
            f"*output_and_gradients_match*two segments*{HALF}]",
            f"*same_bits_twice*{HALF}]",
        ),
    ),
    "adapters, float32": (
        f"{LORA}.py",
        (
            "*output_and_gradients_match*odd ranks*float32]",
            "*ranks_beyond_a_tile*",
            "*reading_dy_twice*",
            "*splitting_the_inner_dimension*",
            "*adding_keeps_what_was_there*",
        ),
    ),
    "adapters, the largest": (f"{LORA}.py", (f"*the_largest_ranks*{HALF}]",)),
    "gradients under every setting": (f"{LORA}.py", (f"*under_every_setting*{HALF}*",)),
    "who adds to a gradient": (
        f"{LORA}.py",
        ("*known_to_be_zero*", "*who_adds*", "*from_whichever_end*", "*more_rank_rows*"),
    ),
    "products, forward": (f"{LORA}_product.py", ("*update_of_each_job*-forward]", "*output_each")),
    "products, backward": (
        f"{LORA}_product.py",
        ("*update_of_each_job*-backward]", "*over_the_linears_of_a_group[[]3]"),
    ),
    "products, tiles and slots": (
        f"{LORA}_product.py",
        (
            "*every_tile_is_written*",
            "*how_many_programs*",
            "*ds_that_is_placed*",
            "*b_turned*",
            "*as_many_jobs_as_there_are_slots",
        ),
    ),
    "the entry": (
        f"{LORA}_inside.py",
        ("*both_ways_have*[[]0.0]", "*both_ways_have*[[]0.3]", "*backward_has*features1]"),
    ),
    "the proof": (
        f"{LORA}_proving.py",
        ("*right_kernels_pass[[]dropout]", "*right_kernels_pass[[]both]"),
    ),
    "settings of other devices": (f"{LORA}_tuner.py", ("*small_devices*float16]",)),
    "weights in fewer bits": (
        "quantised/test_triton.py",
        (
            "*rows_in_fp8*[[]*widths[45]-dtype1]",
            "*no_number_stays_alone[[]4100]",
            "*unpacked_nf4*-dtype1]",
        ),
    ),
    "adapters over weights in fewer bits": (f"{LORA}_quantised.py", ("*",)),
    "adamw": (
        "adamw/test_triton.py",
        (
            "*steps_equal_torchs*",
            "*matrices_without_a_copy*",
            "*ranks_up_to_256*",
            "*does_not_hold*[[]nan-*",
        ),
    ),
    "head and loss": (
        "linear_cross_entropy/test_triton.py",
        (
            f"*losses_and_errors*{HALF}]",
            f"*entry_gives*[[]{HALF}-7-True]",
            "*rows_that_are_not_given*",
            "*without_a_gradient*",
        ),
    ),
}
"""A file, and which of its tests."""

FILES = sorted(str(path.relative_to(KERNELS)) for path in KERNELS.glob("*/test_triton*.py"))
PARTS |= {
    file: (file, ("*",)) for file in FILES if file not in {file for file, _ in PARTS.values()}
}
NUMBERS = {part: number for number, part in enumerate([*PARTS, *TOOLS])}
"""Each has ports of its own to speak to its tools."""


def places(path: Sequence[str] = sys.path) -> list[Path]:
    """Where the tool may be: the toolkit's folders, and those of NVIDIA's wheels."""
    found = [*Path("/usr/local").glob("cuda*/bin"), *Path("/usr/local").glob(f"cuda*/{NAME}")]
    for entry in path:
        found += [each for name in ("bin", NAME) for each in Path(entry).glob(f"nvidia/*/{name}")]
    return sorted(found)


def find_tool(places: Iterable[Path]) -> str | None:
    on_path = shutil.which(NAME)
    each = (str(place / NAME) for place in places)
    return on_path or next((file for file in each if os.access(file, os.X_OK)), None)


TOOL = find_tool(places())
LOOKED = ", ".join(["PATH", "/usr/local/cuda*", "nvidia/* of sys.path", *map(str, places())])


def watches(test: Callable[..., None]) -> Callable[..., None]:
    """A test that needs a device and the tool."""
    no_device, no_tool = "torch sees no CUDA device", f"{NAME} is in none of {LOOKED}"
    for mark in (
        pytest.mark.gpu,
        pytest.mark.slow,
        pytest.mark.skipif(TOOL is None, reason=no_tool),
        pytest.mark.skipif(not torch.cuda.is_available(), reason=no_device),
    ):
        test = mark(test)
    return test


BEYOND = """
import torch, triton, triton.language as tl

@triton.jit
def store(p, at):
    tl.store(p + at + tl.arange(0, 32), 1)

x = torch.zeros(64, dtype=torch.int32, device="cuda")
store[(1,)](x, {at})
torch.cuda.synchronize()
"""
RACE = """
import torch

source = '''extern "C" __global__ void turn(float* x) {{
    __shared__ float shared[64];
    shared[threadIdx.x] = x[threadIdx.x];
    {barrier}
    x[threadIdx.x] = shared[63 - threadIdx.x];
}}'''
x = torch.ones(64, device="cuda")
torch.cuda._compile_kernel(source, "turn")((1, 1, 1), (64, 1, 1), [x])
torch.cuda.synchronize()
"""


def pytest_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]


def collected() -> list[str]:
    """Every test of the kernels' files, as pytest names it."""
    files = [str((KERNELS / file).relative_to(ROOT)) for file in FILES]
    done = subprocess.run(
        [*pytest_command(*files), "--collect-only"], cwd=ROOT, capture_output=True, text=True
    )
    names = [line for line in done.stdout.splitlines() if "::" in line]
    assert done.returncode == 0 and names, done.stdout[-2000:] + done.stderr[-2000:]
    return names


def chosen(part: str, names: Iterable[str]) -> list[str]:
    """Patterns are of the names behind the file's; each is of some test."""
    file, patterns = PARTS[part]
    here = [name for name in names if name.startswith(f"tests/kernels/{file}::")]
    by_pattern = [[name for name in here if fnmatchcase(name, each)] for each in patterns]
    missing = [each for each, found in zip(patterns, by_pattern, strict=True) if not found]
    assert not missing, f"{part}: no test is {missing}"
    return list(dict.fromkeys(name for found in by_pattern for name in found))


def options(tool: str, port: int) -> list[str]:
    return [
        *("--tool", tool, "--error-exitcode", "9", "--print-limit", "5", "--port", str(port)),
        *("--launch-timeout", "120", "--target-processes", "application-only"),
        # Calls that fail are told by the tests; torch tries some that may.
        *("--report-api-errors", "no", "--kernel-name-exclude", "kns=_ZN"),
    ]


def watched(tools: Sequence[str], command: list[str], number: int, folder: Path) -> dict[str, str]:
    """What each tool and the program under it said, side by side; the last line has the exit code.
    Every tensor has memory of its own: beyond one that shares a block with others would be
    somebody's."""
    assert TOOL is not None
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    running = {}
    for i, tool in enumerate(tools):
        port = 49_152 + 32 * number + 16 * i
        with (folder / tool).open("w") as said:
            running[tool] = subprocess.Popen(
                [TOOL, *options(tool, port), *command],
                cwd=ROOT,
                env=environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    said = {}
    for tool, process in running.items():
        try:
            code: object = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            # The tool and the program under it.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = f"none within {LIMIT_S} s"
        text = (folder / tool).read_text(errors="replace")
        said[tool] = f"{text}\nexit code: {code}"
    return said


def is_clean(said: str) -> bool:
    """Of racecheck "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"."""
    counted = re.search(r"SUMMARY: 0 (errors|hazards)", said)
    return counted is not None and said.endswith("exit code: 0")


@pytest.fixture(scope="session")
def names() -> list[str]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    return collected()


@watches
@pytest.mark.parametrize("part", PARTS)
def test_the_kernels_tests_are_clean(part: str, names: list[str], tmp_path: Path) -> None:
    command = pytest_command(*chosen(part, names))
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert first.returncode == 0, first.stdout[-6000:]
    for tool, said in watched(TOOLS, command, NUMBERS[part], tmp_path).items():
        print(f"{part}, {tool}:", *re.findall(r".*(?:SUMMARY|passed).*", said), sep="\n")
        assert is_clean(said), f"{tool}: {said[-6000:]}"
        assert re.search(r"^\d+ passed", said, re.MULTILINE), f"{tool}: {said[-2000:]}"


@watches
@pytest.mark.parametrize(("at", "is_inside"), [(32, True), (48, False)])
def test_a_store_beyond_a_tensor_is_seen(tmp_path: Path, at: int, is_inside: bool) -> None:
    """A twin: else being clean would say nothing."""
    said = of_script(BEYOND.format(at=at), "memcheck", tmp_path)
    assert is_clean(said) == is_inside, said[-2000:]
    assert ("Invalid __global__ write" in said) != is_inside, said[-2000:]


@watches
@pytest.mark.parametrize(("barrier", "waits"), [("__syncthreads();", True), ("", False)])
def test_threads_that_do_not_wait_are_seen(tmp_path: Path, barrier: str, waits: bool) -> None:
    """A twin, too."""
    said = of_script(RACE.format(barrier=barrier), "racecheck", tmp_path)
    assert is_clean(said) == waits, said[-2000:]
    assert ("hazard" in said.replace("0 hazards", "")) != waits, said[-2000:]


def of_script(text: str, tool: str, folder: Path) -> str:
    script = folder / "script.py"
    script.write_text(text)
    return watched([tool], [sys.executable, str(script)], NUMBERS[tool], folder)[tool]


def test_every_part_is_of_tests_that_there_are(names: list[str]) -> None:
    """And of few, each once; files that nobody has chosen from are run whole."""
    chosen_by_part = {part: chosen(part, names) for part in PARTS}
    every = [name for found in chosen_by_part.values() for name in found]
    assert len(every) == len({*every})
    assert {name.split("::")[0] for name in every} == {f"tests/kernels/{file}" for file in FILES}
    assert all(len(found) <= 12 for part, found in chosen_by_part.items() if part not in FILES)
    assert "*" not in PARTS["adapters, the largest"][1]
    with pytest.raises(AssertionError, match="no test is"):
        chosen("adapters, the largest", [name for name in names if "largest" not in name])


def test_the_tool_is_found_in_a_toolkit_or_in_a_wheel(tmp_path: Path) -> None:
    """Where a file of its name can be run."""
    folder = tmp_path / "nvidia" / "cu13" / NAME
    folder.mkdir(parents=True)
    there = places([str(tmp_path)])
    assert folder in there and folder not in places([])
    if shutil.which(NAME) is None:
        (folder / NAME).write_text("")
        assert find_tool([folder]) is None
        (folder / NAME).chmod(0o755)
        assert find_tool([tmp_path, folder]) == str(folder / NAME)
    assert "/usr/local/cuda*" in LOOKED


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("10 passed in 2 s\n= ERROR SUMMARY: 0 errors\nexit code: 0", True),
        ("= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\nexit code: 0", True),
        ("= ERROR SUMMARY: 10 errors\nexit code: 9", False),
        ("= ERROR SUMMARY: 0 errors\nexit code: 1", False),
        ("10 passed in 2 s\nexit code: 0", False),
        ("= ERROR SUMMARY: 0 errors\nexit code: none within 150 s", False),
    ],
)
def test_clean_is_what_has_no_error_and_ends_well(said: str, right: bool) -> None:
    assert is_clean(said) == right
