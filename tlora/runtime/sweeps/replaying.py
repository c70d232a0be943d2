"""A sweep that goes on: what its log holds, whether it is the same one, and its decisions again."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tlora.config.reading import plain
from tlora.core.errors import SpecError
from tlora.core.sweep import SweepSpec
from tlora.runtime.resuming import engine_changes
from tlora.store.study import StudyLog, StudyTurn
from tlora.tuning.study import StudyState, replayed

MAY_CHANGE = (
    "engine",
    "report_to",
    "search.max_seconds",
)
"""Of a sweep that has begun: what changes how long it runs, not what its trials are."""


def known_turns(root: Path, spec: SweepSpec) -> list[StudyTurn]:
    """What an earlier command of the same sweep has logged. Raises SpecError if it was another
    one."""
    path = root / "state.sqlite"
    if not path.exists():
        raise SpecError(
            f"--output: {root} holds a run that is no sweep; name another directory, or add --fresh"
        )
    log = StudyLog(path)
    try:
        about = log.about()
        if about is None:
            raise SpecError(
                f"--output: {root} holds a run that is no sweep; name another directory, or add "
                "--fresh"
            )
        check_unchanged(about["spec"], spec, root)
        return log.turns()
    finally:
        log.close()


def check_unchanged(old: dict[str, Any], spec: SweepSpec, root: Path) -> None:
    new = as_tree(spec)
    changed = [name for name in differing(old, new) if not name.startswith(MAY_CHANGE)]
    from_engine = type(spec.engine)(**old["engine"])
    changed += engine_changes(from_engine, spec.engine)
    if changed:
        raise SpecError(
            f"has changed since {root} was started; change it back, name another --output, or add "
            "--fresh to start over",
            field=changed[0],
        )


def differing(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Dotted names of what is not the same in two trees."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            name
            for key in {**old, **new}
            for name in differing(old.get(key), new.get(key), f"{prefix}{key}.")
        ]
    return [] if old == new else [prefix.removesuffix(".")]


def as_tree(spec: SweepSpec) -> dict[str, Any]:
    return json.loads(json.dumps(plain(asdict(spec))))


def replay(state: StudyState, turns: list[StudyTurn], spec: SweepSpec) -> None:
    """Bring the study to where its log ends. What was decided then must be what is decided now."""
    again = replayed(state, [turn.event for turn in turns])
    for turn, actions in zip(turns, again, strict=True):
        # How many fit depends on the device, and may have changed; who was given up may not.
        if _exits(actions) != _exits(turn.actions):
            raise SpecError(
                "the log of this sweep does not lead to the decisions it holds; it was written by "
                "another version: use that one, or add --fresh to start over"
            )


def _exits(actions: list[Any]) -> set[tuple[str, str]]:
    return {(each.trial, each.verdict.rule) for each in actions if each.kind == "exit"}
