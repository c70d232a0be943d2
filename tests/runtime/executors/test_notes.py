"""What a worker notes down is, after its way through a pipe, what its leader shows and records."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tlora.runtime.executors.messages import Message, Noted, encoded, messages_of
from tlora.runtime.executors.notes import event_of, outcome_of
from tlora.runtime.executors.worker import ToldDirectory
from tlora.runtime.progress import ProgressLines
from tlora.runtime.recording import Recorder
from tlora.runtime.run_log import CAME
from tlora.training.compose import Kind
from tlora.training.outcome import Outcome

OUTCOMES = [
    Outcome(kind=Kind.TRAIN, rows=512, tokens={"a": 300, "b": 90}, seconds=0.125),
    Outcome(kind=Kind.EVALUATE, rows=64, tokens={"a": 64}, seconds=0.5),
    Outcome(kind=Kind.REFERENCE, rows=128, tokens={"b": 100}, seconds=0.25),
    Outcome(kind=Kind.TRAIN, rows=256, tokens={"a": 200}, seconds=1.0, error="out of memory"),
    Outcome(),
]


def noted(outcome: Outcome, root: Path) -> Noted:
    """As a worker's recorder tells it, and as it arrives."""
    told: list[Message] = []
    nobody = cast(Any, None)
    directory = ToldDirectory(root, told.append)
    recorder = Recorder(directory, nobody, nobody, ProgressLines(out=io.StringIO()), nobody)
    recorder.on_nano_batch(outcome)
    (arrived,) = messages_of(encoded(told))
    assert isinstance(arrived, Noted)
    return arrived


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_noted_nano_batch_is_the_one_that_ran(outcome: Outcome, tmp_path: Path) -> None:
    """Every kind, a broken one, and a turn without any; other rows are told apart."""
    note = noted(outcome, tmp_path)
    assert note.what == "nano_batch"
    assert outcome_of(note.fields) == outcome
    assert outcome_of(note.fields | {"rows": outcome.rows + 1}) != outcome


def test_a_kind_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    """And not taken for training."""
    fields = noted(OUTCOMES[0], tmp_path).fields
    with pytest.raises(ValueError, match="'training' is not a valid Kind"):
        outcome_of(fields | {"purpose": "training"})


def test_a_line_of_events_says_which_device_and_keeps_what_was_noted(tmp_path: Path) -> None:
    """Device and time are the leader's to say, whatever the fields hold."""
    note = noted(replace(OUTCOMES[0], seconds=2.0), tmp_path)
    line = event_of(3, note.what, note.time, note.fields | {"device": 0})
    assert line == {"v": 1, "kind": "nano_batch", **note.fields, "device": 3, "time": note.time}


def test_a_job_attached_by_a_worker_has_joined_the_run() -> None:
    """The word that readers of events look for; other words stay as they are."""
    line = event_of(1, "attached", 5.0, {"job": "a", "step": 0})
    assert line == {"v": 1, "kind": "joined", "job": "a", "step": 0, "device": 1, "time": 5.0}
    assert line["kind"] in CAME
    assert event_of(1, "detached", 6.0, {"job": "a"})["kind"] == "detached"


def test_nothing_happened_before_the_run_began() -> None:
    """Readers cut out what lies between two sessions, and a line before one is in the other."""
    assert event_of(0, "attached", 5.0, {"job": "a"}, began=5.001)["time"] == 5.001
    assert event_of(0, "attached", 5.002, {"job": "a"}, began=5.001)["time"] == 5.002
