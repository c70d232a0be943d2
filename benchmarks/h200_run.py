"""Measures the figures of docs/h200.md anew, one script after the other.

    python benchmarks/h200_run.py --results FOLDER --seconds 560 [--only steps-8b steps-1b] [--list]

Every script appends its lines to a file of FOLDER, named as under `results/`, and says all it has
to say into FOLDER/logs. A script whose name is in FOLDER/done has been run and is not run again, so
the same command goes on where time was over. What does not fit into the time left is told and left
out; a script that takes longer than it may is asked to end, and most then keep what they have. The
figures are printed as they come, beside what they are to reach.

Put the lines of FOLDER behind those of `results/`, then `python benchmarks/h200_rows.py --write`.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from h200_rows import BENCH, EXACT, JOINING, LINEARS, MEMORY, ROWS, STEP, TUNED

ROOT = Path(__file__).parents[1]
GRACE_S = 20
"""For a script that is asked to end."""

LAYER = (
    "benchmarks/gpu_linears.py --layer --warm --shadow --tokens 8192 --dropout 0 --inner 32"
    " --rounds 6 --ranks mixed --how write inside --json {file} --adapters"
)
STEPS = "benchmarks/gpu_step.py --seconds {seconds} --json {file} --shape"
MIXED = (
    "-m tlora.runtime.benchmark --shape llama-8b --ranks 8,16,32,64 --seconds {seconds}"
    " --json {file} --batch"
)
LENGTHS = "benchmarks/lengths/mixed_14.txt"


@dataclass(frozen=True)
class Measure:
    name: str
    file: str
    seconds: int
    """That it may take, models and compiling included."""

    command: str

    def arguments(self, results: Path, seconds: float) -> list[str]:
        values = {"seconds": int(seconds), "file": shlex.quote(str(results / self.file))}
        return shlex.split(self.command.format(**values))


MEASURES = [
    Measure("steps-8b", STEP, 200, f"{STEPS} llama-8b --budgets 8192,2048"),
    Measure("steps-1b", STEP, 100, f"{STEPS} llama-1b --budgets 8192"),
    Measure("linears", LINEARS, 150, f"{LAYER} 32 8"),
    Measure("linears-zero", LINEARS, 90, f"{LAYER} 32 --zero"),
    Measure("linears-composed", LINEARS, 90, f"{LAYER} 32 --composed 1"),
    Measure(
        "joining",
        JOINING,
        90,
        "-m pytest -q -s -p no:cacheprovider tests/gpu/test_joining.py --figures {file}",
    ),
    Measure(
        "as-they-come",
        BENCH,
        220,
        f"{MIXED} 1,2,3,4 --lengths {LENGTHS} --steps 12 --budget 8192 --repeats 3 --arms own",
    ),
    Measure(
        "batches-of-16",
        BENCH,
        150,
        f"{MIXED} 16 --steps 2 --budget 8192 --repeats 1 --arms own",
    ),
    Measure(
        "tuned-8b",
        TUNED,
        150,
        "benchmarks/tuned_size.py --shape llama-8b --low 1024 --nano-batches 100 --fixed 4"
        " --json {file}",
    ),
    Measure(
        "tuned-1b",
        TUNED,
        120,
        "benchmarks/tuned_size.py --shape llama-1b --nano-batches 200 --fixed 6 --json {file}",
    ),
    Measure(
        "memory",
        MEMORY,
        210,
        "benchmarks/gpu_memory.py --shape llama-8b --rounds 1 --seconds {seconds} --json {file}",
    ),
    Measure(
        "exact",
        EXACT,
        220,
        "benchmarks/gpu_exact.py --shape llama-1b --seconds {seconds} --json {file}",
    ),
    Measure(
        "linears-small",
        LINEARS,
        200,
        f"{LAYER} 8 --tokens 4096 2048",
    ),
    Measure(
        "linears-dropout",
        LINEARS,
        200,
        f"{LAYER} 8 --dropout 0.05",
    ),
    Measure("peft-1", BENCH, 160, f"{MIXED} 1 --budget 4096 --arms own,peft"),
    Measure(
        "peft-16",
        BENCH,
        240,
        f"{MIXED} 16 --steps 3 --budget 8192 --repeats 2 --arms own,peft",
    ),
]
"""In the order in which they are worth a device's time."""


def run(measure: Measure, results: Path, seconds: float) -> bool:
    """Whether it ended well, and by itself."""
    log = results / "logs" / f"{measure.name}.log"
    with log.open("w", encoding="utf-8") as said:
        process = subprocess.Popen(
            [sys.executable, *measure.arguments(results, seconds)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            return process.wait(seconds + GRACE_S) == 0
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return False


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


def tail(path: Path, lines: int = 15) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def chosen(names: list[str] | None) -> list[Measure]:
    known = {each.name: each for each in MEASURES}
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        sys.exit(f"error: --only: no {', '.join(unknown)}; there are {', '.join(known)}")
    return MEASURES if names is None else [known[name] for name in names]


def run_all(measures: list[Measure], results: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    (results / "logs").mkdir(parents=True, exist_ok=True)
    done = results / "done"
    before = done.read_text(encoding="utf-8").split() if done.exists() else []
    for measure in measures:
        left = until - time.monotonic() - 2 * GRACE_S
        if measure.name in before:
            print(f"{measure.name}: done before")
            continue
        if left < measure.seconds:
            print(f"{measure.name}: left out; it may take {measure.seconds} s of {left:.0f}")
            continue
        began = time.monotonic()
        well = run(measure, results, measure.seconds)
        took = time.monotonic() - began
        print(f"{measure.name}: {took:.0f} s" if well else f"{measure.name}: FAILED, {took:.0f} s")
        report(measure, results)
        if well:
            with done.open("a", encoding="utf-8") as file:
                file.write(f"{measure.name}\n")
        else:
            print(tail(results / "logs" / f"{measure.name}.log"))
        sys.stdout.flush()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, help="the folder for the lines")
    parser.add_argument("--seconds", type=int, default=3600, help="for all together")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these, in this order")
    parser.add_argument("--list", action="store_true", help="print the commands, run none")
    given = parser.parse_args(arguments)
    measures = chosen(given.only)
    if given.list:
        for each in measures:
            command = shlex.join(each.arguments(given.results or Path("FOLDER"), each.seconds))
            print(f"{each.name:16} {each.seconds:4} s  python {command}")
    elif given.results is None:
        parser.error("--results: the folder for the lines is missing")
    else:
        run_all(measures, given.results.resolve(), given.seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
