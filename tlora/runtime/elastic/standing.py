"""How the jobs of a run stand, from what is on disk: for whoever asks from elsewhere. No torch."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora.runtime.run_log import CAME, WAITS, WENT, read_about, read_spec

MOVES = (*CAME, *WENT)
"""Kinds of events."""

TAIL_BYTES = 16_384
"""Of a metrics file: its last lines."""


@dataclass(frozen=True, slots=True)
class Standing:
    job: str
    status: str
    """Of its result, or training, waiting or stopped."""

    step: int
    total_steps: int | None
    """None before its first line."""

    loss: float | None
    tokens_per_s: float | None
    """Of its last step, while it trains."""


def standings(root: Path, *, at_work: bool) -> list[Standing]:
    """Raises SpecError if `root` holds no run."""
    here = read_about(root).get("jobs", [])
    names = [str(job["name"]) for job in read_spec(root / "resolved.yaml").get("jobs", [])]
    waiting = without_place(root) if at_work else set[str]()
    return [
        standing(
            name,
            # Of one that failed and waits to be tried again it is what came of it before.
            None if name in waiting else read_object(root / name / "result.json"),
            last_records(root / name / "metrics.jsonl"),
            trains=at_work and name in here and name not in waiting,
            waits=name in waiting,
        )
        for name in dict.fromkeys([*here, *names])
    ]


def without_place(root: Path) -> set[str]:
    """Jobs that wait for one, by the newest of their events."""
    newest: dict[str, str] = {}
    try:
        with (root / "events.jsonl").open(encoding="utf-8") as file:
            # Nearly all lines are of nano-batches, and need not be read.
            lines = [line for line in file if '"kind": "nano_batch"' not in line]
    except (OSError, UnicodeDecodeError):
        return set()
    for line in lines:
        # One that a crash cut short is passed over.
        with suppress(ValueError):
            event = json.loads(line)
            if event["kind"] in MOVES:
                newest[event["job"]] = event["kind"]
    return {job for job, kind in newest.items() if kind == WAITS}


def standing(
    name: str,
    result: dict[str, Any] | None,
    records: list[dict[str, Any]],
    *,
    trains: bool,
    waits: bool = False,
) -> Standing:
    if result is not None:
        return Standing(
            name, result["status"], result["steps"], result["total_steps"], result["loss"], None
        )
    steps = [record for record in records if record["kind"] == "train"]
    last = steps[-1] if steps else None
    if last is None:
        return Standing(name, "waiting" if trains or waits else "stopped", 0, None, None, None)
    return Standing(
        name,
        "training" if trains else "waiting" if waits else "stopped",
        last["step"],
        last["total_steps"],
        last["loss"],
        last["tokens_per_s"] if trains else None,
    )


def state_of(each: list[Standing], *, at_work: bool) -> str:
    if at_work:
        return "at work"
    return "stopped" if any(one.status == "stopped" for one in each) else "over"


def read_object(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def last_records(path: Path) -> list[dict[str, Any]]:
    """Whole lines at the end of a file that may be growing."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, 2) - TAIL_BYTES)
            file.seek(start)
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return []
    records = []
    for line in lines[1:] if start else lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records
