"""How a sweep begins or goes on, wherever it trains: its directory is taken before its log is read,
and kept until its last file is written."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora.core.errors import SpecError
from tlora.core.sweep import SweepSpec
from tlora.runtime.directory import RunDirectory
from tlora.runtime.opening import create
from tlora.runtime.sweeps.replaying import check_unchanged, known_turns
from tlora.store.study import StudyTurn, read_study_log


@dataclass(frozen=True, slots=True)
class SweepOpening:
    taken: RunDirectory
    """Others write the files; this one keeps everybody else out."""

    turns: dict[str, list[StudyTurn]]
    """By task: what an earlier command has logged."""

    fresh: bool
    goes_on: bool
    """There is a sweep, and it is not started over."""

    @property
    def root(self) -> Path:
        return self.taken.root

    def create(self) -> None:
        create(self.taken, fresh=self.fresh, goes_on=self.goes_on)


@contextmanager
def opened(output: Path, specs: Sequence[SweepSpec], *, fresh: bool) -> Iterator[SweepOpening]:
    """Raises SpecError if somebody else is at work there, or if these are not the same tasks."""
    taken = RunDirectory(output)
    try:
        taken.take_if_there()
        goes_on = taken.is_run and not fresh
        turns: dict[str, list[StudyTurn]] = {spec.task.name: [] for spec in specs}
        if goes_on:
            turns = known_task_turns(output, specs)
        yield SweepOpening(taken, turns, fresh, goes_on)
    finally:
        taken.close()


def known_task_turns(root: Path, specs: Sequence[SweepSpec]) -> dict[str, list[StudyTurn]]:
    """What an earlier command of the same tasks has logged. Raises SpecError if they were
    others."""
    if len(specs) == 1:
        return {specs[0].task.name: known_turns(root, specs[0])}
    log = read_study_log(root)
    try:
        about = log.about() or {}
        before: dict[str, Any] = about.get("tasks") or {about["spec"]["task"]["name"]: None}
        names = [spec.task.name for spec in specs]
        if list(before) != names:
            raise SpecError(
                f"were {', '.join(before)} when {root} was started; change them back, name another "
                "--output, or add --fresh to start over",
                field="tasks",
            )
        for spec in specs:
            check_unchanged(before[spec.task.name], spec, root)
        turns = log.turns()
    finally:
        log.close()
    return {name: [turn for turn in turns if turn.task == name] for name in names}
