"""What people ask of a sweep from another process, through its store. No torch."""

import json
from pathlib import Path
from typing import Any

from tlora.core.errors import SpecError
from tlora.runtime.asking import is_at_work, put_and_wait
from tlora.store.study import read_study_log


def ask(root: Path, kind: str, trial: str, body: dict[str, Any], *, patience_s: float) -> str:
    """Put a request, and wait for its answer if the sweep is running. Raises SpecError for what
    cannot be done."""
    log = read_study_log(root)
    try:
        check_trial(root, trial)
        answer = put_and_wait(log, root, kind, trial, body, patience_s=patience_s).answer
    finally:
        log.close()
    if answer is not None:
        return answer
    if not is_at_work(root):
        return "noted: the sweep is not running, and does it when tlora tune goes on"
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
