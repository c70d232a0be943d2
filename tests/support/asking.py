"""Somebody at another terminal, who asks a run for something while it is at work."""

import io
import json
from pathlib import Path

from tlora.config.dumping import resolved
from tlora.core.job import RunSpec
from tlora.runtime.progress import ProgressLines
from tlora.store.requests import Requests


def submission(spec: RunSpec) -> dict:
    return json.loads(json.dumps(resolved(spec)))


def put(root: Path, *requests: tuple[str, str, dict]) -> list[int]:
    store = Requests(root / "state.sqlite")
    try:
        return [store.request(*each) for each in requests]
    finally:
        store.close()


def answers(root: Path) -> list[str | None]:
    store = Requests(root / "state.sqlite")
    try:
        return [row[0] for row in store._connection.execute("SELECT answer FROM requests")]
    finally:
        store.close()


class Asking(ProgressLines):
    """At a step of a job, once."""

    def __init__(self, root: Path, asked: dict[tuple[str, int], list[tuple[str, str, dict]]]):
        super().__init__(io.StringIO())
        self.root, self.asked = root, asked

    def on_step(self, driver, done) -> None:
        super().on_step(driver, done)
        put(self.root, *self.asked.pop((done.job, done.step), []))
