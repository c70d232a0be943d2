"""Trouble of one trial stays with it, and a sweep says how it ended."""

import json
import time
from dataclasses import replace

from support.sweeps import lines, said, sweep_file

import tlora
from tlora.runtime.sweeps import winning
from tlora.runtime.writing import Writer
from tlora.training.engine import Engine


def test_a_trial_that_diverges_fails_and_the_rest_goes_on(base, rows, tmp_path):
    """Its reason is said; the others' best wins."""
    file = sweep_file(base, rows, exact=False, early_exit={"method": "none"})
    file["search"]["space"] = {"train.learning_rate": [1e-3, 1e38]}
    view = lines()
    study = tlora.tune(tlora.load_sweep(file), output=tmp_path / "run", view=view)
    assert [trial.status for trial in study.trials] == ["completed", "failed"]
    assert study.best is not None and study.best.name == "t-00"
    assert "t-01: failed at step" in said(view)


def test_all_trials_diverging_ends_with_a_word(base, rows, tmp_path):
    """No winner, no crash, and a study that says why."""
    file = sweep_file(base, rows, exact=False)
    file["search"]["space"] = {"train.learning_rate": [1e38, 2e38]}
    study = tlora.tune(tlora.load_sweep(file), output=tmp_path / "run", view=lines())
    assert study.best is None and study.winner is None and not study.interrupted
    assert {trial.status for trial in study.trials} == {"failed"}
    assert all(trial.reason for trial in study.trials)


def test_want_of_memory_makes_a_trial_wait_and_alone_fails_it(base, rows, tmp_path, monkeypatch):
    """A trial that has no memory beside others is tried again when one has gone; one that has none
    by itself fails with the reason; the rest goes on."""
    real, tries = Engine.attach, []

    def attach(self, name, *args, **options):
        tries.append((name, len(self.jobs)))
        if name == "t-03" or (name == "t-01" and self.jobs):
            raise MemoryError("no room for its rows")
        return real(self, name, *args, **options)

    monkeypatch.setattr(Engine, "attach", attach)
    file = sweep_file(base, rows, exact=False, early_exit={"method": "none"})
    file["search"] |= {"space": {"lora.r": [1, 2, 3, 4]}, "max_parallel": None}
    view = lines()
    study = tlora.tune(tlora.load_sweep(file), output=tmp_path / "run", view=view)
    found = {trial.name: trial.status for trial in study.trials}
    assert found == {
        "t-00": "completed",
        "t-01": "completed",
        "t-02": "completed",
        "t-03": "failed",
    }
    failed = next(trial for trial in study.trials if trial.name == "t-03")
    assert "out of memory: no room for its rows" in str(failed.reason)
    assert ("t-01", 0) in tries, "at last it has the device for itself"
    assert "no memory beside the others" in said(view)


def test_a_result_names_the_best_adapter_of_a_slow_disk(base, rows, tmp_path, monkeypatch):
    """Given up while it waited, with its best adapter still on its way: the result waits for it."""
    real = Writer.submit

    def slow(self, order):
        real(self, replace(order, write=lambda: (time.sleep(0.05), order.write())))

    monkeypatch.setattr(Writer, "submit", slow)
    file = sweep_file(base, rows, exact=False, search={"max_parallel": None})
    file["search"]["space"] = {"train.learning_rate": [1e-5, 1e-3, 1e-2, 3e-2]}
    study = tlora.tune(tlora.load_sweep(file), output=tmp_path / "run", view=lines())
    given_up = [trial.name for trial in study.trials if trial.rule == "underperforming"]
    assert len(given_up) == 3
    for name in given_up:
        result = json.loads((tmp_path / "run" / name / "result.json").read_text())
        assert result["best_adapter"] == f"{name}/best"


def test_a_winner_whose_files_give_other_logits_is_not_handed_out(
    base, rows, tmp_path, monkeypatch
):
    """Trials are written without a look at their logits; the winner has one, and a scale off by a
    hundredth is seen."""
    file = sweep_file(base, rows, exact=False, search={"space": {"lora.r": [2]}})
    spec = tlora.load_sweep(file)
    real = winning.adapter_logits
    monkeypatch.setattr(
        winning,
        "adapter_logits",
        lambda model, weights, scale, probe: real(model, weights, 1.01 * scale, probe),
    )
    view = lines()
    study = tlora.tune(spec, output=tmp_path / "run", view=view)
    assert study.best is not None and study.winner is None
    assert "the winner's adapter is not to be used" in said(view)
    monkeypatch.undo()
    assert tlora.tune(spec, output=tmp_path / "run", view=lines()).winner is not None
