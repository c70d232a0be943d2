"""The SQLite store: what comes back, and what a kill leaves."""

import json
import random
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.scheduling import Run, costs_of, request

from tlora.control import Turn
from tlora.control.protocols import turn_of_json
from tlora.control.replay import replay
from tlora.core.cluster import uniform_cluster
from tlora.core.errors import SpecError
from tlora.core.event import GpuFailure, GpuRepair
from tlora.core.state import State
from tlora.schedule import make_policy
from tlora.store import schema
from tlora.store.sqlite import SqliteStore

JOBS = [
    request("a", steps=1000),
    request("b", steps=500, batch=4, gpus=2, at=1.0),
    request("c", steps=100, at=2.0),
]
WORLD = [GpuFailure(5.0, (0,), "lost"), GpuRepair(9.0, (0,))]


def recorded(path: Path) -> tuple[list[Turn], SqliteStore[Turn]]:
    """A simulated run, and the store that was given its turns."""
    run = Run("solo", JOBS, gpus=2, world=WORLD, exits={"b": (10.0, "patience")}).to_the_end()
    turns = list(run.store.turns())
    store: SqliteStore[Turn] = SqliteStore(path, decode=turn_of_json, about={"policy": "solo"})
    for turn in turns:
        store.record(turn)
    return turns, store


def test_turns_come_back_as_they_were_and_replay(tmp_path: Path) -> None:
    """From another connection, to the last bit; a store that lost a turn is found out."""
    turns, _ = recorded(tmp_path / "state.sqlite")
    again: SqliteStore[Turn] = SqliteStore(tmp_path / "state.sqlite", decode=turn_of_json)
    assert list(again.turns()) == turns
    assert again.about() == {"policy": "solo"}
    cluster = uniform_cluster(2)
    policy = make_policy("solo", costs_of(cluster))
    assert replay(again.turns(), state=State(cluster), policy=policy) is None
    short = [turn for turn in turns if turn.number != 2]
    with pytest.raises(AssertionError):
        assert replay(short, state=State(cluster), policy=policy) is None


def test_jobs_stand_as_their_events_and_decisions_say(tmp_path: Path) -> None:
    """Ended ones with their reasons, and a failed GPU sends its jobs back to wait."""
    turns, store = recorded(tmp_path / "state.sqlite")
    standing = {job.name: (job.status, job.reason) for job in store.jobs()}
    assert standing == {
        "a": ("completed", None),
        "b": ("exited", "patience"),
        "c": ("completed", None),
    }
    part: SqliteStore[Turn] = SqliteStore(tmp_path / "part.sqlite", decode=turn_of_json, about={})
    for turn in turns:
        failed = any(event.kind == "gpu_failure" for event in turn.events)
        before = {job.name: (job.status, job.group) for job in part.jobs()}
        # Nothing was decided, so that what the event alone does can be seen.
        part.record(replace(turn, decisions=()) if failed else turn)
        if failed:
            break
    assert before["a"] == ("running", "g0")
    after = {job.name: (job.status, job.group) for job in part.jobs()}
    assert after["a"] == ("waiting", None)


def test_a_second_session_counts_from_zero_and_leaves_the_first(tmp_path: Path) -> None:
    """The same command again."""
    turns, first = recorded(tmp_path / "state.sqlite")
    first.close()
    second: SqliteStore[Turn] = SqliteStore(
        tmp_path / "state.sqlite", decode=turn_of_json, about={"policy": "tlora"}
    )
    second.record(turns[0])
    assert [turn.number for turn in second.turns()] == [0]
    assert list(second.turns(session=1)) == turns


def test_what_is_no_store_or_a_later_one_is_refused(tmp_path: Path) -> None:
    """With a message, not with a traceback of SQLite's."""
    (tmp_path / "no.sqlite").write_text("this is not a database, whatever its name says")
    with pytest.raises(SpecError, match="cannot be used as a store"):
        SqliteStore(tmp_path / "no.sqlite", decode=turn_of_json, about={})
    later = sqlite3.connect(tmp_path / "later.sqlite")
    later.execute("PRAGMA user_version = 99")
    later.close()
    with pytest.raises(SpecError, match="later tlora"):
        SqliteStore(tmp_path / "later.sqlite", decode=turn_of_json, about={})
    recorded(tmp_path / "empty.sqlite")[1].close()
    with pytest.raises(SpecError, match="no session"):
        SqliteStore(tmp_path / "other.sqlite", decode=turn_of_json)


def test_two_that_make_a_store_at_once_make_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has made it after the first found none."""
    ours, theirs = (sqlite3.connect(tmp_path / "new", isolation_level=None) for _ in range(2))
    look = schema.version

    def late(connection: sqlite3.Connection) -> int:
        monkeypatch.setattr(schema, "version", look)
        found = look(connection)
        schema.bring_up(theirs, "theirs")
        return found

    monkeypatch.setattr(schema, "version", late)
    schema.bring_up(ours, "ours")
    assert look(ours) == schema.VERSION


WRITER = """
import json, sys
from dataclasses import replace
from tlora.control.protocols import turn_of_json
from tlora.store.sqlite import SqliteStore
turns = [turn_of_json(turn) for turn in json.load(open(sys.argv[2]))]
store = SqliteStore(sys.argv[1], decode=turn_of_json, about={})
number = 0
while True:
    store.record(replace(turns[number % len(turns)], number=number))
    print(number, flush=True)
    number += 1
"""


@pytest.mark.multi_process
def test_whole_turns_survive_kills(tmp_path: Path) -> None:
    """A writer is killed with SIGKILL over and over, at any moment: every turn that it said it had
    recorded is there, with all its events and decisions, and none beyond it is there in part."""
    turns, store = recorded(tmp_path / "source.sqlite")
    store.close()
    (tmp_path / "turns.json").write_text(json.dumps([turn.as_json() for turn in turns]))
    chance = random.Random(0)
    path = tmp_path / "state.sqlite"
    for session in range(1, 7):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(tmp_path / "turns.json")],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        said = -1
        for _ in range(chance.randrange(1, 60)):
            said = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        said = max([said, *(int(line) for line in writer.stdout.read().split())])
        writer.wait()
        reader: SqliteStore[Turn] = SqliteStore(path, decode=turn_of_json)
        assert reader.session == session
        found = list(reader.turns())
        assert said <= len(found) - 1 <= said + 1
        for number, turn in enumerate(found):
            expected = turns[number % len(turns)]
            assert turn.number == number
            assert (turn.events, turn.decisions) == (expected.events, expected.decisions)
        reader.close()
