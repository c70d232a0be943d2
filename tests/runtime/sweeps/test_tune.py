"""A sweep that really trains: trials as they would be alone, room re-used, and the rules that give
trials up."""

import json
from pathlib import Path

import pytest
from support.kills import adapter_bytes, curves
from support.sweeps import STEPS, lines, log_of, same_end, sweep_file

import tlora
from tlora.core.errors import SpecError
from tlora.training.engine import Engine
from tlora.tuning.events import Attach, Evaluated, Hold
from tlora.tuning.rerun import curves_of, plans_of, rerun
from tlora.tuning.study import StudyState


def test_all_are_warmed_up_and_a_quarter_goes_on(swept):
    """Two at a time: each of the eight gets two steps, two get all; held ones come back."""
    study = json.loads((swept / "study.json").read_text())
    assert study["kind"] == "study" and study["over"]
    by_status = {each["name"]: each["status"] for each in study["trials"]}
    assert sorted(by_status.values()) == ["completed"] * 2 + ["exited"] * 6
    assert {each["step"] for each in study["trials"]} == {2, STEPS}
    best = min(study["trials"], key=lambda each: each["value"])
    assert study["best"] == {key: best[key] for key in ("name", "params", "value")}
    assert 0.6 < study["saved_fraction"] < 0.75
    turns = log_of(swept)
    held = [a.trial for turn in turns for a in turn.actions if isinstance(a, Hold)]
    attached = [a.trial for turn in turns for a in turn.actions if isinstance(a, Attach)]
    assert len(held) == 7 and set(attached) == set(by_status)
    running, most = set(), 0
    for turn in turns:
        for action in turn.actions:
            (running.add if isinstance(action, Attach) else running.discard)(action.trial)
        most = max(most, len(running))
    assert most == 2


def test_every_exit_names_its_rule_and_numbers(swept):
    """In the study, in the log and in the trial's own result."""
    study = json.loads((swept / "study.json").read_text())
    for each in study["trials"]:
        if each["status"] == "exited":
            assert each["rule"] == "underperforming"
            assert each["numbers"]["value"] >= each["numbers"]["cut"]
            assert "after the warm-up is place" in each["reason"]
            result = json.loads((swept / each["name"] / "result.json").read_text())
            assert (result["status"], result["reason"]) == ("stopped_early", each["reason"])
            assert (swept / str(result["best_adapter"]) / "adapter_config.json").is_file()


def test_the_winner_trains_alone_to_the_same_bits(swept, tmp_path):
    """Its job file, alone, gives the curves and adapters that it had among the others, though it
    was held in between; another trial's are not these."""
    settings = json.loads((swept / "winner" / "settings.json").read_text())
    name = settings["trial"]
    alone = tmp_path / "alone"
    tlora.train(tlora.load_spec(swept / "winner" / "job.yaml"), output=alone)
    assert curves(alone, name) == curves(swept, name)
    for kind in ("adapter", "best"):
        assert adapter_bytes(alone, name, kind) == adapter_bytes(swept, name, kind)
    winner = (swept / "winner" / "adapter" / "adapter_model.safetensors").read_bytes()
    assert winner == adapter_bytes(alone, name, "best")
    others = [each.name for each in swept.glob("t-*") if each.name != name]
    assert all(winner != adapter_bytes(swept, each, "best") for each in others)
    assert settings["command"].startswith("tlora train ")


def test_without_early_exit_every_trial_is_the_job_alone(base, rows, tmp_path):
    """The law of isolation: all eight at once, against each of two by itself."""
    file = sweep_file(base, rows, early_exit={"method": "none"}, search={"max_parallel": None})
    study = tlora.tune(tlora.load_sweep(file), output=tmp_path / "all", view=lines())
    assert {trial.status for trial in study.trials} == {"completed"}
    assert study.saved_fraction == 0
    whole = tlora.load_spec(tmp_path / "all" / "resolved.yaml")
    for name in ("t-00", "t-05"):
        one = [job for job in whole.jobs if job.name == name]
        alone = type(whole)(base=whole.base, jobs=tuple(one), engine=whole.engine)
        tlora.train(alone, output=tmp_path / name)
        assert curves(tmp_path / name, name) == curves(tmp_path / "all", name)
        assert adapter_bytes(tmp_path / name, name) == adapter_bytes(tmp_path / "all", name)


def test_a_budget_of_tokens_or_time_ends_the_sweep(base, rows, tmp_path):
    """The best so far wins."""
    for budget in ({"max_tokens": 400}, {"max_seconds": 1e-3}):
        file = sweep_file(base, rows, exact=False, search=budget)
        output = tmp_path / next(iter(budget))
        study = tlora.tune(tlora.load_sweep(file), output=output, view=lines())
        assert not study.interrupted and study.over
        assert any(trial.rule == "budget" for trial in study.trials)


def test_a_trial_that_overfits_keeps_its_best(base, rows, tmp_path):
    """Given up by the gap; the best adapter is there, and wins if it is the best of all."""
    exits = {"overfitting_gap": 0.0, "warmup": 1.0, "smoothing": 1.0}
    file = sweep_file(base, rows, exact=False, early_exit=exits)
    file["defaults"]["train"] |= {"max_steps": 80, "batch_size": 8}
    file["search"] = {"space": {"train.learning_rate": [5e-2]}}
    study = tlora.tune(tlora.load_sweep(file), output=tmp_path / "run", view=lines())
    trial = study.trials[0]
    assert trial.rule == "overfitting" and trial.step < 80
    assert trial.value == trial.numbers["best_eval_loss"]
    assert (
        study.winner is not None and (Path(study.winner.adapter) / "adapter_config.json").exists()
    )


def test_a_winner_that_was_given_up_says_of_which_step_it_is(base, rows, tmp_path):
    """Spared until its best is past: the adapter is older than the trial's end, and its job file
    trains further than the sweep did."""
    exits = {"overfitting_gap": 0.0, "warmup": 1.0, "smoothing": 1.0, "overfitting_past_best": True}
    file = sweep_file(base, rows, exact=False, early_exit=exits)
    file["defaults"]["train"] |= {"max_steps": 80, "batch_size": 8}
    file["search"] = {"space": {"train.learning_rate": [5e-2]}}
    study = tlora.tune(tlora.load_sweep(file), output=tmp_path / "run", view=lines())
    trial = study.trials[0]
    assert trial.rule == "overfitting" and trial.numbers["best_step"] < trial.step < 80
    settings = json.loads((tmp_path / "run" / "winner" / "settings.json").read_text())
    assert settings["step"] == trial.numbers["best_step"]
    report = " ".join((tmp_path / "run" / "report.html").read_text().split())
    assert f"given up at step {trial.step} of 80. This trains it alone, to its own end" in report


def test_preference_jobs_are_swept_by_their_accuracy(base, tmp_path):
    """Betas are compared by which answer is preferred; the rules see the accuracy of every
    evaluation, and the best trial has the highest of the last ones."""
    path = tmp_path / "pairs.jsonl"
    pairs = [
        {"prompt": f"w{at} w1", "chosen": f"w{at % 5} w2", "rejected": f"w{at % 7} w3"}
        for at in range(20)
    ]
    path.write_text("\n".join(json.dumps(pair) for pair in pairs) + "\n")
    file = sweep_file(base, path, exact=False, search={"max_parallel": None})
    file["defaults"]["train"] |= {"loss": "dpo", "learning_rate": 1e-3}
    file["search"] |= {
        "space": {"train.beta": [0.05, 0.1, 0.5, 1.0]},
        "objective": {"metric": "eval_accuracy", "mode": "max"},
    }
    study = tlora.tune(tlora.load_sweep(file), output=tmp_path / "run", view=lines())
    told = [turn.event for turn in log_of(tmp_path / "run") if isinstance(turn.event, Evaluated)]
    assert told and all(0 <= each.metrics["eval_accuracy"] <= 1 for each in told)
    assert study.best is not None and study.winner is not None
    assert study.best.value == max(trial.value for trial in study.trials if trial.value is not None)


def test_the_curves_of_a_whole_sweep_tell_what_a_rule_would_have_done(base, rows, swept, tmp_path):
    """The real sweep with early exit, two at a time, gave up the same trials on the same numbers as
    the curves of one without, brought through the rule again."""
    file = sweep_file(base, rows, early_exit={"method": "none"}, search={"max_parallel": None})
    tlora.tune(tlora.load_sweep(file), output=tmp_path / "whole", view=lines())
    events = [turn.event for turn in log_of(tmp_path / "whole")]
    spec = tlora.load_sweep(sweep_file(base, rows))
    again = rerun(StudyState.of(spec, None), plans_of(events), curves_of(events))
    study = json.loads((swept / "study.json").read_text())
    real = {each["name"]: (each["status"], each["numbers"]) for each in study["trials"]}
    found = {
        name: (trial.phase.value, trial.verdict.numbers if trial.verdict else {})
        for name, trial in again.trials.items()
    }
    assert found == real
    assert again.tokens_spent == study["tokens_spent"]


def test_an_engine_that_runs_ahead_gives_up_the_same_trials(
    base, rows, swept, tmp_path, monkeypatch
):
    """As on a GPU, where results are read while the next nano-batch runs: the same bits."""
    real = Engine.__init__

    def ahead(self, *args, **options):
        real(self, *args, **{**options, "ahead": 1})

    monkeypatch.setattr(Engine, "__init__", ahead)
    spec = tlora.load_sweep(sweep_file(base, rows))
    tlora.tune(spec, output=tmp_path / "run", view=lines())
    same_end(tmp_path / "run", swept)


def test_without_held_out_rows_the_training_loss_decides(base, rows, tmp_path):
    """With no early exit; the last adapter wins."""
    file = sweep_file(base, rows, exact=False, early_exit={"method": "none"})
    file["defaults"]["eval"] = {}
    file["search"] |= {"objective": {"metric": "loss"}, "space": {"lora.r": [2, 4]}}
    study = tlora.tune(tlora.load_sweep(file), output=tmp_path / "run", view=lines())
    assert study.best is not None and study.winner is not None
    settings = json.loads((tmp_path / "run" / "winner" / "settings.json").read_text())
    assert settings["adapter_from"] == f"{study.best.name}/adapter"
    assert study.best.value == min(trial.value for trial in study.trials if trial.value)


def test_preferences_are_tried_by_what_held_out_pairs_say(base, tmp_path):
    """The margin is as large as can be; a supervised task logs none."""
    pairs = tmp_path / "pairs.jsonl"
    texts = [{"prompt": f"{i} is ", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(16)]
    pairs.write_text("".join(json.dumps(each) + "\n" for each in texts))
    objective = {"objective": {"metric": "eval_margin", "mode": "max"}}
    file = sweep_file(base, pairs, exact=False, search=objective, early_exit="none")
    file["search"]["space"] = {"train.learning_rate": [1e-5, 1e-2]}
    with pytest.raises(
        SpecError, match=r"search.objective.metric: 'eval_margin' is logged of pref"
    ):
        tlora.load_sweep(file)
    file["task"]["train"] = {"loss": "dpo"}
    study = tlora.tune(tlora.load_sweep(file), output=tmp_path / "run", view=lines())
    slow, fast = (study.trials[place].value for place in (0, 1))
    assert slow is not None and fast is not None and study.best is not None
    assert fast > 10 * abs(slow)
    assert study.best.value == fast and study.best.params == {"train.learning_rate": 1e-2}
