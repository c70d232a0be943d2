"""How jobs stand, from what is on disk."""

import json
from pathlib import Path

import yaml

from tlora.runtime.elastic.standing import last_records, standings, state_of


def line(step: int, kind: str = "train") -> str:
    record = {"kind": kind, "step": step, "total_steps": 9, "loss": 1.5, "tokens_per_s": 100.0}
    return json.dumps(record) + "\n"


def run(root: Path) -> Path:
    """One over, one under way, one that has not begun, one that this run leaves out."""
    jobs = [{"name": name} for name in ("over", "on", "new", "out")]
    (root / "resolved.yaml").write_text(yaml.safe_dump({"jobs": jobs}))
    (root / "run.json").write_text(json.dumps({"jobs": ["over", "on", "new"]}))
    for name in ("over", "on", "out"):
        (root / name).mkdir()
        (root / name / "metrics.jsonl").write_text(line(1) + line(2) + line(2, "eval") + '{"kind')
    result = {"status": "cancelled", "steps": 2, "total_steps": 9, "loss": 1.5}
    (root / "over" / "result.json").write_text(json.dumps(result))
    return root


def test_jobs_stand_by_their_results_or_their_last_lines(tmp_path: Path) -> None:
    """Whole ones; what nobody trains is stopped."""
    found = standings(run(tmp_path), at_work=True)
    assert [(each.job, each.status, each.step) for each in found] == [
        ("over", "cancelled", 2),
        ("on", "training", 2),
        ("new", "waiting", 0),
        ("out", "stopped", 2),
    ]
    assert [each.tokens_per_s for each in found] == [None, 100.0, None, None]
    assert state_of(found, at_work=True) == "at work"
    later = standings(tmp_path, at_work=False)
    assert {each.status for each in later} == {"cancelled", "stopped"}
    assert state_of(later, at_work=False) == "stopped"
    assert state_of(later[:1], at_work=False) == "over"


def event(kind: str, job: str, **fields: object) -> str:
    return json.dumps({"v": 1, "kind": kind, "job": job, **fields, "time": 1.0}) + "\n"


def test_who_began_and_waits_for_a_place_does_not_train(tmp_path: Path) -> None:
    """By the newest event that says so, of a job that failed before as well, and only while
    somebody is at work."""
    run(tmp_path)
    result = {"status": "failed", "steps": 2, "total_steps": 9, "loss": 1.5}
    (tmp_path / "out" / "result.json").write_text(json.dumps(result))
    nano_batch = json.dumps({"v": 1, "kind": "nano_batch", "tokens": {"joined": 3}}) + "\n"
    began = event("attached", "on", step=0)
    stopped = [event("waits", "on"), event("waits", "out"), event("waits", "new")]
    later = event("joined", "new", step=0)
    cut = event("joined", "on")[:30] + "\n"
    (tmp_path / "events.jsonl").write_text("".join([began, nano_batch, *stopped, later, cut]))
    found = {each.job: each for each in standings(tmp_path, at_work=True)}
    assert {job: each.status for job, each in found.items()} == {
        "over": "cancelled",
        "on": "waiting",
        "new": "waiting",
        "out": "waiting",
    }
    assert (found["on"].step, found["on"].loss, found["on"].tokens_per_s) == (2, 1.5, None)
    left = {each.job: each.status for each in standings(tmp_path, at_work=False)}
    assert (left["on"], left["out"]) == ("stopped", "failed")


def test_a_long_file_is_read_from_its_end(tmp_path: Path) -> None:
    """Without the line that the look begins in."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step) for step in range(1000)))
    found = last_records(path)
    assert found[-1]["step"] == 999 and 10 < len(found) < 500
    assert last_records(tmp_path / "none") == []
