"""The page of H200 figures: its table is what the lines say, and what measures them can be run."""

import itertools
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rows(load_script):
    return load_script("h200_rows")


@pytest.fixture
def runs(load_script):
    return load_script("h200_run")


def write(folder: Path, file: str, *lines: dict) -> None:
    with (folder / file).open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


def of_linears(layer: float, group: float, **case: object) -> dict:
    usual = {"tokens": 8192, "adapters": 32, "ranks": "mixed", "dropout": 0.0, "zero": False}
    figures = {"overhead_inside": layer, "overhead_inside_by_group": group}
    return {"shape": "8b", "commit": "abc", "results": [{"case": usual | case, **figures}]}


def of_step(fraction: float, budget: int = 8192, **settings: object) -> dict:
    usual = {"shape": "llama-8b", "layers": None}
    line = {"budget": budget, "frozen_fraction": fraction, "tokens_per_s": 1e4, "commit": "abc"}
    return line | {"settings": usual | settings}


def of_bench(batch: list[int], fused: float, frozen: float, commit: str) -> dict:
    settings = {"ranks": [8, 16, 32, 64], "batch": batch, "nano_batch_tokens": 8192}
    rates = {"fused": {"tokens_per_s": fused}, "frozen": {"best": frozen}}
    return {"shape": "llama-8b", "commit": commit, "settings": settings, **rates}


def said(rows, what: str, folder: Path) -> str:
    found = [line for line in rows.table(results=folder).splitlines() if f"| {what}" in line]
    assert len(found) == 1
    return found[0].split("|")[4].strip()


def test_the_page_has_the_table_of_the_lines(rows) -> None:
    """A figure cannot be written there by hand, nor be left behind by a newer line."""
    page = rows.PAGE.read_text(encoding="utf-8")
    made = rows.table()
    assert page.count(rows.BEGIN) == page.count(rows.END) == 1
    assert made in page, "python benchmarks/h200_rows.py --write"
    assert rows.with_table(page, made) == page
    assert rows.with_table(page, "| other |\n") != page
    # What the device waits for, and a step of real lengths.
    assert made.count("| not measured |") <= 2


def test_the_newest_line_counts_and_what_misses_its_bar_is_bold(rows, tmp_path) -> None:
    what = "the same, 32 adapters, all gradients added to"
    assert said(rows, what, tmp_path) == "not measured"
    write(tmp_path, rows.LINEARS, of_linears(0.121, 0.123))
    assert said(rows, what, tmp_path) == "**+12.1 / +12.3 %**"
    write(tmp_path, rows.LINEARS, of_linears(0.121, 0.117))
    assert said(rows, what, tmp_path) == "+12.1 / +11.7 %"
    # Other cases, and lines that say other things, are none of this row.
    write(tmp_path, rows.LINEARS, of_linears(0.1, 0.1, adapters=8), of_linears(0.1, 0.1, zero=True))
    write(tmp_path, rows.LINEARS, of_linears(0.1, 0.1, composed=1), of_linears(0.1, 0.1, tokens=1))
    write(tmp_path, rows.LINEARS, {"shape": "8b", "results": []}, {"bench": "other"})
    assert said(rows, what, tmp_path) == "+12.1 / +11.7 %"


def test_real_lengths_are_rows_of_their_own(rows, tmp_path) -> None:
    """Where the update inside was timed it counts, else the update outside, which is said; of
    several nano-batches all are told, and their mean is held against the bar."""
    what = "the same, lengths of gsm8k"
    lengths = {"composed": 40, "lengths": "gsm8k.txt"}
    outside = of_linears(0.0, 0.0, **lengths)
    for each in outside["results"]:
        del each["overhead_inside"], each["overhead_inside_by_group"]
        each |= {"overhead_write": 0.125, "overhead_write_by_group": 0.117}
    write(tmp_path, rows.LINEARS, outside)
    assert said(rows, what, tmp_path) == "**+12.5 / +11.7 %, update outside**"
    inside = of_linears(0.12, 0.118, composed=40, lengths="benchmarks/lengths/gsm8k.txt")
    inside["results"] += of_linears(0.122, 0.11, composed=47, lengths="gsm8k.txt")["results"]
    write(tmp_path, rows.LINEARS, inside, of_linears(0.1, 0.1, composed=1, lengths="512"))
    assert said(rows, what, tmp_path) == "+12.0 / +11.8, +12.2 / +11.0 %"
    assert said(rows, "the same, 32 jobs as the engine", tmp_path) == "+10.0 / +10.0 %"
    assert said(rows, "the same, lengths of scitldr", tmp_path) == "not measured"
    write(tmp_path, rows.STEP, of_step(0.91, lengths="benchmarks/lengths/mixed_14.txt"))
    real = "frozen fraction, 8B, 8,192 tokens, sequences of real lengths"
    assert said(rows, real, tmp_path) == "0.910 (10,000 tokens/s)"
    assert said(rows, "frozen fraction, 8B, 8,192 tokens, every job", tmp_path) == "not measured"


def test_the_idle_device_is_of_three_steps_of_one_commit(rows, tmp_path) -> None:
    what = "time of a step in which no kernel runs"
    steps = [of_step(0.9), of_step(0.9, budget=2048), of_step(0.9, shape="llama-1b")]
    for step, share in zip(steps, (0.011, 0.013, 0.019), strict=True):
        write(tmp_path, rows.STEP, step | {"idle_share": share})
        found = said(rows, what, tmp_path)
    assert found == "1.1, 1.3, 1.9 %"
    write(tmp_path, rows.STEP, steps[0] | {"idle_share": 0.021})
    assert said(rows, what, tmp_path) == "**2.1, 1.3, 1.9 %**"


def test_fractions_are_held_to_be_at_least(rows, tmp_path) -> None:
    what = "frozen fraction, 8B, 2,048 tokens"
    write(tmp_path, rows.STEP, of_step(0.849, budget=2048))
    assert said(rows, what, tmp_path).startswith("**0.849")
    write(tmp_path, rows.STEP, of_step(0.85, budget=2048), of_step(0.5))
    write(tmp_path, rows.STEP, of_step(0.99, budget=2048, layers=2))
    assert said(rows, what, tmp_path) == "0.850 (10,000 tokens/s)"


def test_jobs_as_they_come_are_held_against_the_fastest_frozen_of_their_commit(
    rows, tmp_path
) -> None:
    """Frozen nano-batches of their own line are not full."""
    what = "useful tokens/s, 8B, batches of 1 to 4"
    own = of_bench([1, 2, 3, 4], 900, 1000, "new") | {"frozen_fraction": 0.9}
    write(tmp_path, rows.BENCH, of_bench([16], 1100, 1250, "old"), own)
    assert said(rows, what, tmp_path) == "0.900 (900 of 1,000 tokens/s)"
    write(tmp_path, rows.BENCH, of_bench([16], 1100, 1200, "new"))
    assert said(rows, what, tmp_path) == "**0.750 (900 of 1,200 tokens/s)**"
    assert said(rows, "against mLoRA", tmp_path) == "**2.21x**"


def test_every_measure_is_of_a_script_that_takes_its_options(
    runs, load_script, monkeypatch, capsys, tmp_path
) -> None:
    """Told on a device, a misspelt option would cost its time."""
    helps: dict[str, str] = {}
    for measure in runs.MEASURES:
        script, *arguments = measure.arguments(tmp_path, 100, "MODEL", "DATASETS")
        if script == "-m":
            script = arguments.pop(0)
        if script == "pytest":
            continue
        if script not in helps:
            monkeypatch.setattr(sys, "argv", [script, "--help"])
            if script.startswith("benchmarks/"):
                main = load_script(Path(script).stem).main
            else:
                main = load_script(f"{script}.__main__").main
            with pytest.raises(SystemExit):
                main(["--help"]) if main.__code__.co_argcount else main()
            helps[script] = capsys.readouterr().out
        options = [each for each in arguments if each.startswith("--")]
        assert "--json" in options
        for option in options:
            assert f"{option} " in helps[script] or f"{option}\n" in helps[script], option
        paths = [each for each in arguments if each.startswith("benchmarks/")]
        assert all((ROOT / each).exists() for each in paths)
    assert len(helps) >= 5


def test_every_row_has_a_measure(rows, runs) -> None:
    others = {runs.TESTS, runs.NOISE, runs.BITS}
    assert {row.file for row in rows.ROWS} | others == {each.file for each in runs.MEASURES}


def test_every_part_ends_within_its_time(runs) -> None:
    """Also where every script takes all that it may; then none is left out."""
    assert runs.PARTS[:3] == ["tests", "jobs", "noise"]
    for part in runs.PARTS:
        measures = runs.chosen(None, [part])
        assert measures and sum(each.seconds for each in measures) <= runs.PART_S - 2 * runs.GRACE_S
    assert runs.chosen(None, None) == runs.MEASURES
    assert [each.name for each in runs.chosen(["exact", "noise"], None)] == ["exact", "noise"]


def test_the_tests_of_a_device_are_all_there(runs, tmp_path) -> None:
    """Each in one measure."""
    measures = [each for each in runs.MEASURES if "pytest" in each.command]
    asked = [each.arguments(tmp_path, 100) for each in measures]
    first, *others = asked
    left_out = {b for a, b in itertools.pairwise(first) if a == "--ignore"}
    assert left_out == {each for other in others for each in other if each.startswith("tests/")}
    assert all((ROOT / each).exists() for each in left_out)
    kernels = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/kernels/*/test_triton*.py")}
    assert "tests/gpu" in first and kernels <= {*first}


SCRIPT = """
import json, sys, time
line = {line!r}
open({file!r}, "a").write(json.dumps(line) + chr(10))
time.sleep({wait})
sys.exit({code})
"""


def measure_of(runs, name: str, line: dict, *, wait: float = 0, code: int = 0):
    def command(file: str) -> str:
        made = SCRIPT.format(line=line, file=file, wait=wait, code=code)
        return f"-c {shlex.quote(made)}"

    class Made(runs.Measure):
        def arguments(self, results: Path, *_: object) -> list[str]:
            return shlex.split(command(str(results / self.file)))

    return Made(name, "steps", runs.STEP, 1, "")


def test_a_run_goes_on_where_it_ended(runs, monkeypatch, capsys, tmp_path) -> None:
    """What failed or had no time is run again, what was done is not."""
    monkeypatch.setattr(runs, "GRACE_S", 1)
    good = measure_of(runs, "good", of_step(0.95))
    bad = measure_of(runs, "bad", of_step(0.5), code=3)
    slow = measure_of(runs, "slow", of_step(0.91, budget=2048), wait=60)
    runs.run_all([good, bad, slow], tmp_path, 60)
    out = capsys.readouterr().out
    assert "good: 0 s" in out and "0.950 (10,000 tokens/s) (to reach 0.90: met)" in out
    assert "bad: FAILED" in out and "0.500 (10,000 tokens/s) (to reach 0.90: NOT MET)" in out
    assert "slow: FAILED, 2 s" in out, "it was asked to end"
    assert (tmp_path / "done").read_text() == "good\n"
    runs.run_all([good, measure_of(runs, "late", of_step(0.9))], tmp_path, 2)
    out = capsys.readouterr().out
    assert "good: done before" in out and "late: left out" in out
    assert len((tmp_path / runs.STEP).read_text().splitlines()) == 3


SAID = """
[gw0] [ 10%] PASSED tests/gpu/test_cuda.py::test_one[a, b]
[gw1] [ 20%] FAILED tests/gpu/test_cuda.py::test_two
[gw1] [ 30%] SKIPPED tests/gpu/test_exact.py::test_three
FAILED tests/gpu/test_cuda.py::test_two - assert
random inputs: TLORA_TEST_SEED=77
"""


def test_a_line_says_which_tests_passed_as_far_as_they_came(runs, capsys, tmp_path) -> None:
    """Also where they were ended; and it says why tests were skipped."""
    line = runs.tested(runs.MEASURES[0], ["-m", "pytest"], SAID, 12.34, False)
    assert (line["passed"], line["failed"], line["skipped"], line["seed"]) == (1, 1, 1, 77)
    assert line["files"]["tests/gpu/test_cuda.py"] == {"passed": 1, "failed": 1}
    assert line["failed_tests"] == ["tests/gpu/test_cuda.py::test_two"] and not line["well"]
    assert runs.tested(runs.MEASURES[0], [], "", 1.0, False)["seed"] is None

    class Tests(runs.Measure):
        def arguments(self, results: Path, *_: object) -> list[str]:
            test = str(ROOT / "tests/gpu/test_sanitizer.py")
            wanted = [f"{test}::test_a_store_beyond_a_tensor_is_seen", f"{test}::{CLEAN}"]
            return shlex.split("-m pytest -v -p no:cacheprovider -n 1") + wanted

    pytest.importorskip("xdist")
    runs.run_all([Tests("few", "tests", runs.TESTS, 60, "")], tmp_path, 200)
    (line,) = [json.loads(each) for each in (tmp_path / runs.TESTS).read_text().splitlines()]
    out = capsys.readouterr().out
    assert line["passed"] + line.get("skipped", 0) == 8 and line["well"]
    assert f"    {line['passed']} passed, failed: []" in out
    assert ("SKIPPED [" in out) == ("skipped" in line)


CLEAN = "test_clean_is_what_has_no_error_and_ends_well"


def test_what_a_script_has_started_ends_with_it(runs, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(runs, "GRACE_S", 1)
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '100']).pid)"
    measure = measure_of(runs, "quick", {})
    assert runs.run(measure, ["-c", script], tmp_path, 30)
    pid = int((tmp_path / runs.LOG).read_text().splitlines()[-1])
    state = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("it runs on")


def test_the_noise_needs_a_model(runs, capsys, tmp_path) -> None:
    runs.run_all(runs.chosen(["noise"], None), tmp_path, 1000)
    assert "noise: left out; it needs --model and --data" in capsys.readouterr().out
    noise = runs.chosen(["noise"], None)[0].arguments(tmp_path, 10, "a model", "data")
    assert noise[noise.index("--model") + 1] == "a model"


def test_a_measure_that_nobody_knows_is_told(tmp_path) -> None:
    command = [sys.executable, "benchmarks/h200_run.py", "--results", str(tmp_path)]
    done = subprocess.run(
        [*command, "--only", "setps-8b"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and "no setps-8b; there are tests-gpu" in done.stderr
