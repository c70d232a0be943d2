"""What the GPU scripts share: figures that are said as soon as they are known and end as one JSON
line, whatever stops the script.

A lent GPU is paid by the minute, so a script has a time limit: parts that do not fit are left out,
and what was measured by then is kept.
"""

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tlora.runtime.benchmark.machine import device_name
from tlora.runtime.benchmark.record import commit, versions


class OutOfTime(BaseException):
    """No Exception: an engine would take it for something that a job did."""


class Figures:
    """One script's results. `values` becomes the JSON line."""

    def __init__(
        self, kind: str, seconds: float, device: torch.device, *, compiled: bool = False
    ) -> None:
        self.started = time.monotonic()
        self.seconds = seconds
        self.values: dict[str, object] = {
            "v": 1,
            "kind": kind,
            "commit": commit(),
            "command": "python " + shlex.join(sys.argv),
            "device": device_name(device),
            "versions": versions(),
            "complete": False,
            "compiled": compiled,
        }

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:5.1f} s] {text}", flush=True)

    def note(self, name: str, value: object) -> None:
        """Kept, and said."""
        self.values[name] = value
        self.say(f"{name}: {json.dumps(value)}")

    def table(self, head: list[str], rows: list[list[object]]) -> None:
        cells = [head, *([_text(cell) for cell in row] for row in rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        for row in cells:
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        sys.stdout.flush()


def _text(cell: object) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "NO"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def options(text: str | None, *, seconds: int) -> argparse.ArgumentParser:
    """What every script takes."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="no compiled layers")
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    parser.add_argument(
        "--seconds", type=int, default=seconds, help=f"stop after so many [{seconds}]"
    )
    return parser


def compiles(given: argparse.Namespace) -> bool:
    """As a run does by default."""
    return torch.device(given.device).type == "cuda" and not given.eager


@contextmanager
def figures(kind: str, given: argparse.Namespace) -> Iterator[Figures]:
    """Appends and prints the line at the end, also of what was broken off."""
    found = Figures(kind, given.seconds, torch.device(given.device), compiled=compiles(given))
    try:
        with limit(given.seconds):
            yield found
        found.values["complete"] = True
    except OutOfTime:
        found.say("stopped: the figures are not complete")
    except BaseException as error:
        found.values["error"] = f"{type(error).__name__}: {error}"[:500]
        raise
    finally:
        found.values["seconds"] = round(time.monotonic() - found.started, 1)
        line = json.dumps(found.values)
        print(line, flush=True)
        if given.json is not None:
            with given.json.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raises OutOfTime in the main thread once the time is over, or somebody ends the script."""

    def stop(number: int, frame: object) -> None:
        raise OutOfTime

    before = {each: signal.signal(each, stop) for each in (signal.SIGALRM, signal.SIGTERM)}
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        for each, handler in before.items():
            signal.signal(each, handler)
