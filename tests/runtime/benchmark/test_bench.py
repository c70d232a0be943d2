"""The whole benchmark where memory is short."""

import json
from pathlib import Path

import pytest
import torch

from tlora.runtime.benchmark.__main__ import main
from tlora.runtime.benchmark.lineup import Lineup


def test_peft_without_room_beside_ours_is_measured_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once ours is done with; then nothing is missing."""
    pytest.importorskip("peft")
    prepare, released = Lineup.peft, []
    alone = Lineup.alone

    def without_room(lineup: Lineup, how: str):
        if not released:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prepare(lineup, how)

    def watched(lineup: Lineup, kind: str):
        released.append(kind)
        return alone(lineup, kind)

    monkeypatch.setattr(Lineup, "peft", without_room)
    monkeypatch.setattr(Lineup, "alone", watched)
    target = tmp_path / "bench.jsonl"
    arguments = ["--shape", "demo", "--device", "cpu", "--jobs", "2", "--ranks", "2", "--batch"]
    arguments += ["1", "--lengths", "9", "--steps", "1", "--repeats", "2", "--arms", "peft"]
    assert main([*arguments, "--skip-compile", "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    assert released == ["peft"]
    assert found["complete"] and found["ratio_peft"] > 0
    assert found["arms"]["PEFT, padded"]["repeats"] == 2
    assert "PEFT, padded: out of memory in round 1" in found["notes"]
