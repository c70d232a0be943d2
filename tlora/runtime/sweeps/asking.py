"""What people ask of a sweep from another process, through its store. No torch."""

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from tlora.core.errors import SpecError
from tlora.store.study import read_study_log

POLL_S = 0.1


def ask(root: Path, kind: str, trial: str, body: dict[str, Any], *, patience_s: float) -> str:
    """Put a request, and wait for its answer if the sweep is running. Raises SpecError for what
    cannot be done."""
    log = read_study_log(root)
    try:
        check_trial(root, trial)
        number = log.request(kind, trial, body)
        if not is_at_work(root):
            return "noted: the sweep is not running, and does it when tlora tune goes on"
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            answer = log.answer_to(number)
            if answer is not None:
                if answer.startswith("error: "):
                    raise SpecError(answer.removeprefix("error: "))
                return answer
            time.sleep(POLL_S)
    finally:
        log.close()
    return "noted: the sweep is busy, and does it between two nano-batches"


def read_study(root: Path) -> dict[str, Any]:
    """How the sweep stands. Raises SpecError if there is none."""
    try:
        return json.loads((root / "study.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise SpecError(f"{root} is not the directory of a sweep: no study.json") from None


def check_trial(root: Path, trial: str) -> None:
    names = [each["name"] for each in read_study(root)["trials"]]
    if trial not in names:
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        raise SpecError(f"{root} has no trial '{trial}'; there are {shown}")


def is_at_work(root: Path) -> bool:
    """A process holds the directory."""
    handle = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
