"""What rules save and lose, on a sweep whose answer is known."""

import importlib
import json
from pathlib import Path

import pytest

from tlora.store.study import StudyLog
from tlora.tuning.events import Added, Closed, Completed, Evaluated, TrialPlan

FOLDER = Path(__file__).parents[2] / "benchmarks"
TOTAL = 20


def write_sweep(root: Path) -> None:
    """Eight trials of 20 steps evaluated at each: the later the better at first; of the two that a
    warm-up keeps the last one is the best, and the first of all ends better than both."""
    root.mkdir()
    log = StudyLog(root / "state.sqlite")
    log.begin({"spec": {"search": {"objective": {"metric": "eval_loss", "mode": "min"}}}})
    plans = [
        TrialPlan(
            name=f"t{at}",
            params={"lora.r": at + 1},
            total_steps=TOTAL,
            total_tokens=100 * TOTAL,
            batch_size=1,
            adapter_bytes=1.0,
        )
        for at in range(8)
    ]
    log.append(Added(tuple(plans)), [])
    log.append(Closed(), [])
    for step in range(1, TOTAL + 1):
        for at in range(8):
            loss = 10.0 - at - 0.01 * step if at or step < TOTAL else 1.0
            metrics = {"eval_loss": loss, "loss": loss}
            log.append(Evaluated(trial=f"t{at}", step=step, tokens=100 * step, metrics=metrics), [])
    for at in range(8):
        log.append(Completed(trial=f"t{at}", step=TOTAL, tokens=100 * TOTAL), [])
    log.close()


def test_savings_and_regret_by_hand(tmp_path, monkeypatch, capsys) -> None:
    """ALTO: eight warm-ups of one step and two trials to the end, 8 + 2 x 19 of 160 steps. Its
    winner, 2.8, is the second best; the best, 1, was given up: a regret of 180 %."""
    monkeypatch.syspath_prepend(str(FOLDER))
    script = importlib.import_module("sweep_rules")
    write_sweep(tmp_path / "sweep")
    script.main([str(tmp_path / "sweep"), "--json", str(tmp_path / "rows.json")])
    assert "alto, as published" in capsys.readouterr().out
    rows = {row["rule"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    alto, none = rows["alto, as published"], rows["none"]
    assert alto["saved"] == pytest.approx(1 - 46 / 160)
    assert (alto["place"], alto["kept_best"]) == (2, False)
    assert alto["regret"] == pytest.approx(1.8) and alto["exits"] == {"underperforming": 6}
    assert (none["saved"], none["regret"], none["kept_best"]) == (0.0, 0.0, True)
