"""Measures the figures of docs/h200.md anew, one script after the other.

    python benchmarks/h200_run.py --results FOLDER --part tests [--seconds 560]
    python benchmarks/h200_run.py --results FOLDER --only steps-8b steps-1b
    python benchmarks/h200_run.py --list

Without --part or --only it is all of them. A part is some nine minutes of a device; parts stand in
the order of what is wanted most, and so do the measures of each:

    tests   tests/gpu and those of the Triton kernels, side by side; then under compute-sanitizer
    jobs    batches as they come, 32 adapters with real lengths, a job that joins
    noise   a fused bf16 run against runs alone (--model has SmolLM2-135M, --data the datasets);
            batches of 16, every arm but PEFT, what the device waits
    steps   whole steps of an 8B and a 1B model, also with real lengths
    limits  memory, the size that a search finds, 8B and 1B
    exact   what exact isolation costs; the linears of a layer
    peft    PEFT with batches of 1 and of 16
    layers  the linears of a layer with fewer tokens and with dropout
    others  every arm with a 1B model
    bits    frozen linears in fewer bits, and whole steps on them

Every script appends its lines to a file of FOLDER, named as under `results/`, and all say what they
have to say into FOLDER/log.txt. A script whose name is in FOLDER/done has been run and is not run
again, so the same command goes on where time was over. A script that may take longer than the time
left is told and left out; one that takes longer than it may is asked to end, and what it has kept
by then stays. The figures are printed as they come, beside what they are to reach.

The tests need pytest and pytest-xdist, PEFT's arm peft; nothing else is needed beside torch, Triton
and transformers. Put the lines of FOLDER behind those of `results/`, then
`python benchmarks/h200_rows.py --write`.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from h200_rows import BENCH, EXACT, JOINING, LINEARS, MEMORY, ROWS, STEP, TUNED

ROOT = Path(__file__).parents[1]
GRACE_S = 20
"""For a script that is asked to end."""

PART_S = 560
"""That a part may take, so that ten minutes are enough for it."""

TESTS, NOISE, BITS = "h200_tests.jsonl", "bf16_noise.jsonl", "h200_quantised.jsonl"
LOG = "log.txt"
SIDE_BY_SIDE = 10
"""Processes of tests: one has up to ten gigabytes on the device."""

MOST_SKIPPED = 20
"""Reasons that are printed; all are in the log."""

PYTEST = f"-m pytest -v -p no:cacheprovider -n {SIDE_BY_SIDE} --dist worksteal"
KERNEL_TESTS = " ".join(
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "tests" / "kernels").glob("*/test_triton*.py"))
)
LAYER = (
    "benchmarks/gpu_linears.py --layer --warm --shadow --tokens 8192 --dropout 0 --inner 32"
    " --rounds 6 --ranks mixed --how write inside --json {file} --adapters"
)
STEPS = "benchmarks/gpu_step.py --seconds {seconds} --json {file} --shape"
MIXED = (
    "-m tlora.runtime.benchmark --shape llama-8b --ranks 8,16,32,64 --seconds {seconds}"
    " --json {file} --batch"
)
LENGTHS = "benchmarks/lengths"


@dataclass(frozen=True)
class Measure:
    name: str
    part: str
    file: str
    seconds: int
    """That it may take, models and compiling included."""

    command: str

    def arguments(
        self, results: Path, seconds: float, model: str = "MODEL", data: str = "DATASETS"
    ) -> list[str]:
        values = {"seconds": int(seconds), "file": shlex.quote(str(results / self.file))}
        values |= {"model": shlex.quote(model), "data": shlex.quote(data)}
        return shlex.split(self.command.format(**values))


MEASURES = [
    Measure(
        "tests-gpu",
        "tests",
        TESTS,
        340,
        f"{PYTEST} tests/gpu {KERNEL_TESTS} --ignore tests/gpu/test_sanitizer.py"
        # Its pauses are for a device of its own.
        " --ignore tests/gpu/test_joining.py",
    ),
    Measure("sanitizer", "tests", TESTS, 180, f"{PYTEST} tests/gpu/test_sanitizer.py"),
    Measure(
        "as-they-come",
        "jobs",
        BENCH,
        230,
        f"{MIXED} 1,2,3,4 --lengths {LENGTHS}/mixed_14.txt --steps 12 --budget 8192 --repeats 2"
        " --arms own,compiled",
    ),
    Measure(
        "linears-lengths",
        "jobs",
        LINEARS,
        110,
        f"{LAYER} 32 --rounds 4 --composed 40 47 --lengths {LENGTHS}/gsm8k.txt",
    ),
    Measure(
        "linears-lengths-1",
        "jobs",
        LINEARS,
        100,
        f"{LAYER} 32 --composed 40 --batch 1 --lengths {LENGTHS}/scitldr.txt",
    ),
    Measure(
        "joining",
        "jobs",
        JOINING,
        70,
        "-m pytest -q -s -p no:cacheprovider tests/gpu/test_joining.py --figures {file}",
    ),
    Measure(
        "noise",
        "noise",
        NOISE,
        240,
        "benchmarks/bf16_noise.py --model {model} --data {data} --seconds {seconds} --json {file}",
    ),
    Measure(
        "batches-of-16",
        "noise",
        BENCH,
        240,
        f"{MIXED} 16 --steps 1 --budget 8192 --repeats 1 --arms own,compiled,one-at-a-time,plain",
    ),
    Measure("steps-8b", "steps", STEP, 190, f"{STEPS} llama-8b --budgets 8192,2048"),
    Measure("steps-1b", "steps", STEP, 90, f"{STEPS} llama-1b --budgets 8192"),
    Measure(
        "steps-8b-lengths",
        "steps",
        STEP,
        110,
        f"{STEPS} llama-8b --budgets 8192 --lengths {LENGTHS}/mixed_14.txt",
    ),
    Measure(
        "memory",
        "limits",
        MEMORY,
        200,
        "benchmarks/gpu_memory.py --shape llama-8b --rounds 1 --seconds {seconds} --json {file}",
    ),
    Measure(
        "tuned-8b",
        "limits",
        TUNED,
        150,
        "benchmarks/tuned_size.py --shape llama-8b --low 1024 --nano-batches 100 --fixed 4"
        " --json {file}",
    ),
    Measure(
        "tuned-1b",
        "limits",
        TUNED,
        120,
        "benchmarks/tuned_size.py --shape llama-1b --nano-batches 200 --fixed 6 --json {file}",
    ),
    Measure(
        "exact",
        "exact",
        EXACT,
        220,
        "benchmarks/gpu_exact.py --shape llama-1b --seconds {seconds} --json {file}",
    ),
    Measure("linears", "exact", LINEARS, 150, f"{LAYER} 32 8"),
    Measure("linears-zero", "exact", LINEARS, 75, f"{LAYER} 32 --zero"),
    Measure("linears-composed", "exact", LINEARS, 75, f"{LAYER} 32 --composed 1"),
    Measure(
        "peft-16",
        "peft",
        BENCH,
        300,
        f"{MIXED} 16 --steps 2 --budget 8192 --repeats 1 --arms own,compiled,one-at-a-time,peft",
    ),
    Measure(
        "peft-1",
        "peft",
        BENCH,
        220,
        f"{MIXED} 1 --budget 4096 --repeats 2 --arms own,compiled,one-at-a-time,peft",
    ),
    Measure("linears-small", "layers", LINEARS, 200, f"{LAYER} 8 --tokens 4096 2048"),
    Measure("linears-dropout", "layers", LINEARS, 200, f"{LAYER} 8 --dropout 0.05"),
    Measure(
        "batches-of-16-1b",
        "others",
        BENCH,
        220,
        f"{MIXED} 16 --shape llama-1b --steps 2 --budget 8192 --repeats 2"
        " --arms own,compiled,one-at-a-time,plain,peft",
    ),
    Measure(
        "linears-in-fewer-bits",
        "bits",
        BITS,
        120,
        "benchmarks/gpu_quantised.py --shape 8b --seconds {seconds} --json {file}",
    ),
    *(
        Measure(
            f"batches-of-16-{how}",
            "bits",
            # A file of their own: rows of the page are of a base in full.
            BITS,
            200,
            f"{MIXED} 16 --steps 2 --budget 8192 --repeats 1 --arms own,compiled"
            f" --quantization {how}",
        )
        for how in ("fp8", "nf4")
    ),
]
"""In the order in which they are worth a device's time, part by part."""

PARTS = list(dict.fromkeys(measure.part for measure in MEASURES))


def run(measure: Measure, arguments: list[str], results: Path, seconds: float) -> bool:
    """Whether it ended well, and by itself. Nothing of it runs on."""
    with (results / LOG).open("a", encoding="utf-8") as said:
        said.write(f"==== {measure.name}: {shlex.join(arguments)}\n")
        said.flush()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"},
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(seconds + GRACE_S) == 0
        except subprocess.TimeoutExpired:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def python_path() -> str:
    """This checkout, before what is there already."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


TOLD = re.compile(r"^\[gw\d+\] .*?(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (tests/\S+?)(::.*)")
"""What pytest -v says of a test, as soon as it is through, where tests run side by side."""


def tested(measure: Measure, arguments: list[str], said: str, seconds: float, well: bool) -> dict:
    """A line of what the tests did, as far as they came."""
    # Of this checkout, as the tests; late, since torch takes its time and here some of the device.
    sys.path.insert(0, str(ROOT))
    import torch

    from tlora.runtime.benchmark.machine import device_name
    from tlora.runtime.benchmark.record import commit, versions

    by_file: dict[str, Counter[str]] = {}
    failed: list[str] = []
    for line in said.splitlines():
        if found := TOLD.match(line):
            outcome, file, name = found.groups()
            by_file.setdefault(file, Counter())[outcome.lower()] += 1
            failed += [file + name] if outcome in ("FAILED", "ERROR") else []
    seed = re.search(r"TLORA_TEST_SEED=(\d+)", said)
    return {
        "v": 1,
        "kind": "gpu_tests",
        "name": measure.name,
        "commit": commit(),
        "command": shlex.join(["python", *arguments]),
        "device": device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "versions": versions(),
        "seconds": round(seconds, 1),
        "seed": int(seed[1]) if seed else None,
        # Whether pytest has ended with nothing wrong, and not been ended.
        "well": well,
        **sum(by_file.values(), Counter()),
        "failed_tests": failed,
        "files": {file: dict(outcomes) for file, outcomes in sorted(by_file.items())},
    }


def report(measure: Measure, results: Path) -> None:
    """What its file says now."""
    for row in ROWS:
        found = row.newest(results) if row.file == measure.file else None
        if found is None:
            continue
        _, said = found
        verdict = ""
        if row.bar.first is not None:
            is_met = "met" if row.bar.is_met(said.number) else "NOT MET"
            verdict = f" (to reach {row.bar.text}: {is_met})"
        print(f"    {row.what}: {said.text}{verdict}")


def chosen(names: list[str] | None, parts: list[str] | None) -> list[Measure]:
    """By name in the order given, or those of parts; all where neither is."""
    known = {each.name: each for each in MEASURES}
    for given, there, option in ((names, known, "--only"), (parts, PARTS, "--part")):
        unknown = [name for name in given or [] if name not in there]
        if unknown:
            sys.exit(f"error: {option}: no {', '.join(unknown)}; there are {', '.join(there)}")
    if names is not None:
        return [known[name] for name in names]
    return [each for part in parts or PARTS for each in MEASURES if each.part == part]


def run_all(
    measures: list[Measure], results: Path, seconds: float, model: str = "", data: str = ""
) -> None:
    until = time.monotonic() + seconds
    results.mkdir(parents=True, exist_ok=True)
    log, done = results / LOG, results / "done"
    before = done.read_text(encoding="utf-8").split() if done.exists() else []
    for measure in measures:
        left = until - time.monotonic() - 2 * GRACE_S
        if measure.name in before:
            print(f"{measure.name}: done before")
            continue
        if left < measure.seconds:
            print(f"{measure.name}: left out; it may take {measure.seconds} s of {left:.0f}")
            continue
        if measure.file == NOISE and not (model and data):
            print(f"{measure.name}: left out; it needs --model and --data")
            continue
        began = time.monotonic()
        start = log.stat().st_size if log.exists() else 0
        arguments = measure.arguments(results, measure.seconds, model, data)
        well = run(measure, arguments, results, measure.seconds)
        took = time.monotonic() - began
        print(f"{measure.name}: {took:.0f} s" if well else f"{measure.name}: FAILED, {took:.0f} s")
        said = log.read_bytes()[start:].decode(errors="replace")
        if measure.file == TESTS:
            line = tested(measure, arguments, said, took, well)
            with (results / TESTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"    {line.get('passed', 0)} passed, failed: {line['failed_tests']}")
            for each in re.findall(r"^SKIPPED \[.*", said, re.MULTILINE)[:MOST_SKIPPED]:
                print(f"    {each}")
        report(measure, results)
        if well:
            with done.open("a", encoding="utf-8") as file:
                file.write(f"{measure.name}\n")
        else:
            print("\n".join(said.splitlines()[-15:]))
        sys.stdout.flush()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, help="the folder for the lines")
    parser.add_argument(
        "--seconds", type=int, help=f"for all together [{PART_S} a part, else an hour]"
    )
    parser.add_argument("--part", nargs="+", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these, in this order")
    parser.add_argument("--model", default="", help="of the noise: the folder of SmolLM2-135M")
    parser.add_argument("--data", default="", help="of the noise: the folder of NAME.jsonl.gz")
    parser.add_argument("--list", action="store_true", help="print the commands, run none")
    given = parser.parse_args(arguments)
    measures = chosen(given.only, given.part)
    if given.list:
        for each in measures:
            command = each.arguments(given.results or Path("FOLDER"), each.seconds)
            print(f"{each.part:6} {each.name:21} {each.seconds:4} s  python {shlex.join(command)}")
    elif given.results is None:
        parser.error("--results: the folder for the lines is missing")
    else:
        seconds = given.seconds or (PART_S * len(given.part) if given.part else 3600)
        run_all(measures, given.results.resolve(), seconds, given.model, given.data)


if __name__ == "__main__":
    main(sys.argv[1:])
