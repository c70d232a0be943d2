"""Which task was where, when: read off events."""

import json

import pytest

from tlora.runtime.sweeps.gantt import gantt
from tlora.runtime.sweeps.timeline import read_timeline, timeline_of

TASKS = {"a-0": "a", "a-1": "a", "b-0": "b"}


def event(kind: str, time: float, **fields) -> dict:
    return {"kind": kind, "time": time, **fields}


def test_a_killed_session_goes_on_where_it_ended():
    """Trials that overlap are one bar; the pause between two sessions is left out, and what the
    leading process says before the workers are there moves no clock."""
    records = [
        event("planned", 90.0),
        event("assigned", 91.0, device=0, task="a"),
        event("began", 100.0),
        event("joined", 101.0, job="a-0", device=0),
        event("joined", 102.0, job="a-1", device=0),
        event("joined", 101.0, job="b-0", device=1),
        event("nano_batch", 104.0, device=0, seconds=2.0, tokens={"a-0": 30, "a-1": 10}),
        event("detached", 105.0, job="a-0", device=0),
        event("nano_batch", 106.0, device=1, seconds=1.0, tokens={"b-0": 5}),
        # Killed; half a minute later:
        event("assigned", 136.0, device=1, task="b"),
        event("began", 140.0),
        event("joined", 141.0, job="b-0", device=0),
        event("ended", 144.0, job="b-0", device=0),
    ]
    found = timeline_of(records, TASKS, 2)
    assert [(bar.device, bar.task, bar.begin, bar.end, bar.trials) for bar in found.bars] == [
        (0, "a", 1.0, 6.0, 2),
        (0, "b", 7.0, 10.0, 1),
        (1, "b", 1.0, 6.0, 1),
    ]
    assert found.seconds == 10.0 and found.plans == 1
    assert found.device_seconds("a") == pytest.approx(2.0)
    assert found.busy_share == pytest.approx(3.0 / 20)
    picture = str(gantt(found, ["a", "b"]))
    assert picture.count("<title>") == 3 and "b on device 1: 0:01 to 0:06" in picture


def test_a_sweep_that_was_stopped_as_it_began_has_no_timeline(tmp_path):
    """Its trials came and no time passed: there is nothing to show, or to divide by."""
    told = [event("began", 9.0), event("joined", 9.0, job="a-0", device=0)]
    later = [*told, event("ended", 10.0, job="a-0", device=0)]
    for records, seconds in ((told, None), (later, 1.0)):
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        found = read_timeline(tmp_path, TASKS, 1)
        assert (found and found.seconds) == seconds


def test_names_are_escaped():
    """Whatever a task is called."""
    records = [
        event("began", 0.0),
        event("joined", 0.0, job="x", device=0),
        event("ended", 9.0, job="x", device=0),
    ]
    picture = str(gantt(timeline_of(records, {"x": "<b>"}, 1), ["<b>"]))
    assert "<b>" not in picture and "&lt;b&gt;" in picture
