"""A sweep that really trains: trials as they would be alone, room re-used, trouble that stays with
whom it belongs to, and a restart that loses nothing."""

import io
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import yaml
from support.kills import adapter_bytes, carry_out, curves
from support.runs import job_file

import tlora
from tlora.core.errors import SpecError
from tlora.runtime.sweeps import running, winning
from tlora.runtime.sweeps import tune as tune_module
from tlora.runtime.sweeps.view import View
from tlora.runtime.writing import Writer
from tlora.store.study import StudyLog
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine
from tlora.tuning.events import Attach, Completed, Evaluated, Exit, Hold
from tlora.tuning.rerun import curves_of, plans_of, rerun
from tlora.tuning.space import sample
from tlora.tuning.study import StudyState

STEPS = 20


def sweep_file(base: Path, rows: Path, *, exact: bool = True, **changes: Any) -> dict[str, Any]:
    """Eight trials of twenty steps, evaluated every second one; two at a time."""
    file = job_file(base)
    del file["jobs"]
    file["defaults"]["train"]["max_steps"] = STEPS
    file["defaults"] |= {"eval": {"split": 4, "steps": 2}, "save": {"steps": 3}}
    file["engine"] = {
        "device": "cpu",
        "isolation": "exact" if exact else "default",
        "nano_batch_tokens": 128,
    }
    file["task"] = {"name": "t", "data": {"path": str(rows)}}
    file["search"] = {
        "space": {
            "lora.r": [2, 4],
            "train.learning_rate": [1e-5, 1e-3, 1e-2, 3e-2],
        },
        "max_parallel": 2,
    }
    # So that the published gap of a tenth does not end every trial of a toy.
    file["early_exit"] = {"warmup": 0.1, "overfitting_gap": 9.0}
    for key, value in changes.items():
        file[key] = {**file.get(key, {}), **value} if isinstance(value, dict) else value
    return file


def lines() -> View:
    return View(io.StringIO())


def said(view: View) -> str:
    assert isinstance(view.out, io.StringIO)
    return view.out.getvalue()


def log_of(output: Path) -> list:
    log = StudyLog(output / "state.sqlite")
    try:
        return log.turns()
    finally:
        log.close()


@pytest.fixture(scope="module")
def swept(base, rows, tmp_path_factory) -> Path:
    """An undisturbed sweep."""
    output = tmp_path_factory.mktemp("swept") / "run"
    study = tlora.tune(tlora.load_sweep(sweep_file(base, rows)), output=output, view=lines())
    assert study.best is not None
    return output


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


class StopAfter(View):
    """A person who presses Ctrl-C after some nano-batches."""

    def __init__(self, nano_batches: int) -> None:
        super().__init__(io.StringIO())
        self.left = nano_batches

    def on_nano_batch(self, outcome) -> None:
        super().on_nano_batch(outcome)
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def same_end(output: Path, other: Path) -> None:
    study, expected = (json.loads((each / "study.json").read_text()) for each in (output, other))
    assert study["best"] == expected["best"] and study["trials"] == expected["trials"]
    name = study["best"]["name"]
    assert curves(output, name) == curves(other, name)
    path = Path("winner") / "adapter" / "adapter_model.safetensors"
    assert (output / path).read_bytes() == (other / path).read_bytes()


def told_once(output: Path) -> None:
    """No trial is evaluated twice at a step, begins twice, or is given up twice."""
    turns = log_of(output)
    evaluations = [(t.event.trial, t.event.step) for t in turns if isinstance(t.event, Evaluated)]
    assert len(evaluations) == len(set(evaluations))
    exits = [a.trial for turn in turns for a in turn.actions if isinstance(a, Exit)]
    assert len(exits) == len(set(exits)) == 6


def test_ctrl_c_and_the_same_command_again(base, rows, swept, tmp_path):
    """Stopped in the warm-up and after it; the end is that of the undisturbed sweep."""
    spec = tlora.load_sweep(sweep_file(base, rows))
    for nano_batches in (9, 20, 10):
        study = tlora.tune(spec, output=tmp_path / "run", view=StopAfter(nano_batches))
        assert study.interrupted and study.winner is None
    study = tlora.tune(spec, output=tmp_path / "run", view=lines())
    assert not study.interrupted
    same_end(tmp_path / "run", swept)
    told_once(tmp_path / "run")


@pytest.mark.multi_process
def test_kill_and_restart_loses_nothing(base, rows, swept, tmp_path):
    """Killed again and again with SIGKILL: no trial lost, none run twice, the same winner bit for
    bit."""
    files = {"run": sweep_file(base, rows)}
    outcomes = carry_out(
        tmp_path, files, run={"kills": 6, "seed": 3, "nano_batches": 24, "sweep": True}
    )
    assert outcomes["run"]["killed"] >= 4
    same_end(tmp_path / "run", swept)
    told_once(tmp_path / "run")


def test_a_finished_sweep_is_left_as_it_is(base, rows, swept):
    """The same command once more trains nothing."""
    before = (swept / "events.jsonl").read_text().count('"nano_batch"')
    study = tlora.tune(tlora.load_sweep(sweep_file(base, rows)), output=swept, view=lines())
    assert study.best is not None and len(study.trials) == 8
    assert (swept / "events.jsonl").read_text().count('"nano_batch"') == before


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"early_exit": {"keep": 0.5}}, "early_exit.keep"),
        ({"search": {"seed": 4}}, "search.seed"),
        ({"defaults": {"lora": {"r": 2, "lora_alpha": 9}}}, "task.lora.lora_alpha"),
        ({"engine": {"nano_batch_tokens": 256}}, "engine.nano_batch_tokens"),
    ],
)
def test_a_changed_sweep_is_refused_by_name(base, rows, swept, changes, field):
    """Rules, space, task, and what decides bits."""
    with pytest.raises(SpecError) as caught:
        tlora.tune(tlora.load_sweep(sweep_file(base, rows, **changes)), output=swept, view=lines())
    assert caught.value.field == field


def test_a_run_that_is_no_sweep_is_not_taken_for_one(base, rows, tmp_path):
    """Nor overwritten."""
    tlora.train(
        tlora.load_spec(job_file(base, {"name": "a", "data": {"path": str(rows)}})),
        output=tmp_path / "run",
    )
    with pytest.raises(SpecError, match="no sweep"):
        spec = tlora.load_sweep(sweep_file(base, rows))
        tlora.tune(spec, output=tmp_path / "run", view=lines())


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


class Asking(View):
    """Somebody at another terminal, after so many nano-batches."""

    def __init__(self, output: Path, *requests: tuple[str, str, dict], after: int = 2) -> None:
        super().__init__(io.StringIO())
        self.output, self.requests, self.nano_batches = output, requests, 0
        self.after = after

    def on_nano_batch(self, outcome) -> None:
        super().on_nano_batch(outcome)
        self.nano_batches += 1
        if self.nano_batches == self.after:
            log = StudyLog(self.output / "state.sqlite")
            for request in self.requests:
                log.request(*request)
            log.close()


def test_a_person_stops_clones_and_resumes_while_it_runs(base, rows, tmp_path, monkeypatch):
    """Through the run's own store; what cannot be done is answered, too."""
    monkeypatch.setattr(running, "LOOK_EVERY_S", 0.0)
    file = sweep_file(base, rows, exact=False, search={"max_parallel": None})
    output = tmp_path / "run"
    view = Asking(
        output,
        ("stop", "t-00", {}),
        ("clone", "t-05", {"train.learning_rate": 5e-3}),
        ("resume", "t-00", {}),
        ("stop", "t-99", {}),
    )
    study = tlora.tune(tlora.load_sweep(file), output=output, view=view)
    found = {trial.name: trial for trial in study.trials}
    assert found["t-00"].status == "completed" == found["t-05.1"].status
    assert found["t-00"].step == STEPS, "it runs to its end, not to where it was stopped"
    assert found["t-05.1"].params["train.learning_rate"] == 5e-3
    log = StudyLog(output / "state.sqlite")
    answers = [log.answer_to(number) for number in (1, 2, 3, 4)]
    log.close()
    assert answers[1] == "cloned as t-05.1" and "no trial 't-99'" in str(answers[3])
    names = [job["name"] for job in yaml.safe_load((output / "resolved.yaml").read_text())["jobs"]]
    assert "t-05.1" in names


class Chance:
    """Stands in for Optuna's samplers: draws, and notes what it is told."""

    told: ClassVar[dict[str, float | None]] = {}

    def __init__(self, search, *, asked: int = 0) -> None:
        self.search, self.asked = search, asked

    def ask(self, name: str) -> dict[str, Any]:
        self.asked += 1
        return sample(self.search.space, Random(self.asked))

    def tell(self, name: str, value: float | None) -> None:
        self.told[name] = value

    def expect(self, name: str, params: dict[str, Any]) -> None:
        pass

    def remember(self, params: dict[str, Any], value: float) -> None:
        pass


def test_a_sampler_that_decides_as_it_goes_is_asked_when_there_is_room(
    base, rows, tmp_path, monkeypatch
):
    """Two at a time: all five are asked for one by one, warmed up, and told of."""
    monkeypatch.setattr(tune_module, "OptunaSampler", Chance)
    monkeypatch.setattr(tune_module, "check_sampler", lambda name: None)
    file = sweep_file(base, rows, exact=False, search={"sampler": "tpe", "trials": 5})
    file["search"]["space"]["train.learning_rate"] = {"log": [1e-4, 1e-1]}
    spec = tlora.load_sweep(file)
    assert tlora.tune(spec, output=tmp_path / "run", view=StopAfter(9)).interrupted
    study = tlora.tune(spec, output=tmp_path / "run", view=lines())
    assert [trial.name for trial in study.trials] == [f"t-{at:02}" for at in range(5)]
    assert sorted(trial.status for trial in study.trials) == ["completed"] * 2 + ["exited"] * 3
    assert study.best is not None and Chance.told[study.best.name] == study.best.value


def test_a_sampler_hears_of_warm_ups_before_it_is_asked_for_the_rest(
    base, rows, tmp_path, monkeypatch
):
    """With room for all: eight are asked for, the next ones as values come in, none after all."""
    course: list[str] = []

    class Noted(Chance):
        def ask(self, name: str) -> dict[str, Any]:
            course.append("ask")
            return super().ask(name)

        def tell(self, name: str, value: float | None) -> None:
            course.append("tell")

    monkeypatch.setattr(tune_module, "OptunaSampler", Noted)
    monkeypatch.setattr(tune_module, "check_sampler", lambda name: None)
    search = {"sampler": "tpe", "trials": 11, "max_parallel": None}
    file = sweep_file(base, rows, exact=False, search=search)
    file["search"]["space"] = {"train.learning_rate": {"log": [1e-4, 1e-1]}}
    study = tlora.tune(tlora.load_sweep(file), output=tmp_path / "run", view=lines())
    assert len(study.trials) == 11 and study.over
    assert course[:9] == ["ask"] * 8 + ["tell"]
    unheard = [course[:at].count("ask") - course[:at].count("tell") for at in range(len(course))]
    assert max(unheard[: len(course) - course[::-1].index("ask")]) <= 8


def test_optuna_tunes(base, rows, tmp_path):
    """Optuna itself, stopped once: every trial is asked for once, and there is a winner."""
    pytest.importorskip("optuna", reason="an extra: pip install 'tlora[tune]'")
    search = {"sampler": "tpe", "trials": 10, "max_parallel": None}
    file = sweep_file(base, rows, exact=False, search=search)
    file["search"]["space"] = {"lora.r": [2, 4], "train.learning_rate": {"log": [1e-4, 1e-1]}}
    spec = tlora.load_sweep(file)
    assert tlora.tune(spec, output=tmp_path / "run", view=StopAfter(6)).interrupted
    study = tlora.tune(spec, output=tmp_path / "run", view=lines())
    assert [trial.name for trial in study.trials] == [f"t-{at:02}" for at in range(10)]
    assert len({str(trial.params) for trial in study.trials}) == 10
    assert study.winner is not None


def test_a_clone_that_a_crash_left_unanswered_is_there_once(base, rows, tmp_path, monkeypatch):
    """Gone between the log and the answer: the request is answered with the clone that there is,
    and one that is asked for again is another."""
    monkeypatch.setattr(running, "LOOK_EVERY_S", 0.0)
    file = sweep_file(base, rows, exact=False, search={"max_parallel": None})
    spec, output = tlora.load_sweep(file), tmp_path / "run"
    with monkeypatch.context() as patch:

        def gone(self, number, text):
            raise KeyboardInterrupt

        patch.setattr(StudyLog, "answer", gone)
        view = Asking(output, ("clone", "t-05", {"train.learning_rate": 5e-3}))
        with pytest.raises(KeyboardInterrupt):
            tlora.tune(spec, output=output, view=view)
    again = Asking(output, ("clone", "t-05", {"train.learning_rate": 6e-3}), after=1)
    study = tlora.tune(spec, output=output, view=again)
    clones = {t.name: t.params["train.learning_rate"] for t in study.trials if "." in t.name}
    assert clones == {"t-05.1": 5e-3, "t-05.2": 6e-3}
    log = StudyLog(output / "state.sqlite")
    assert [log.answer_to(number) for number in (1, 2)] == [
        "cloned as t-05.1",
        "cloned as t-05.2",
    ]
    log.close()


def test_a_clone_that_could_not_be_compared_is_refused(base, rows, swept, tmp_path):
    """By what it would change, and with exact isolation by a rank that nothing was shown for; one
    of a rank that was comes."""
    output = tmp_path / "run"
    shutil.copytree(swept, output)
    log = StudyLog(output / "state.sqlite")
    wanted = [{"train.seed": 3}, {"train.max_length": 8}, {"lora.r": 3}, {"lora.r": 2}]
    numbers = [log.request("clone", "t-05", changes) for changes in wanted]
    log.close()
    spec = tlora.load_sweep(sweep_file(base, rows))
    study = tlora.tune(spec, output=output, view=lines())
    log = StudyLog(output / "state.sqlite")
    seed, length, rank, known = (str(log.answer_to(number)) for number in numbers)
    log.close()
    assert "data.eval_path" in seed and "other ones" in length
    assert "exact isolation was shown for 2, 4" in rank
    assert known == "cloned as t-05.1"
    assert [trial.name for trial in study.trials if "." in trial.name] == ["t-05.1"]


def test_a_crash_before_an_end_is_told_attaches_nobody_twice(base, rows, tmp_path, monkeypatch):
    """A trial's files are on disk and its end is not in the log: going on tells it, which brings
    the next trial; each of them is attached once, and nobody trains a second time."""
    file = sweep_file(base, rows, exact=False, early_exit={"method": "none"})
    file["search"]["space"] = {"train.learning_rate": [1e-4, 1e-3, 1e-2]}
    spec, output = tlora.load_sweep(file), tmp_path / "run"
    with monkeypatch.context() as patch:
        tell = running.SweepRunner.tell

        def cut(self, event):
            if isinstance(event, Completed):
                raise KeyboardInterrupt
            tell(self, event)

        patch.setattr(running.SweepRunner, "tell", cut)
        with pytest.raises(KeyboardInterrupt):
            tlora.tune(spec, output=output, view=lines())
    over = [path.parent.name for path in output.glob("*/result.json")]
    assert over and not any(isinstance(turn.event, Completed) for turn in log_of(output))
    attached: list[str] = []
    real = Engine.attach

    def attach(self, name, *args, **options):
        attached.append(name)
        return real(self, name, *args, **options)

    monkeypatch.setattr(Engine, "attach", attach)
    study = tlora.tune(spec, output=output, view=lines())
    assert {trial.status for trial in study.trials} == {"completed"}
    assert "t-02" in attached and len(attached) == len(set(attached))
    assert not set(over) & set(attached)
    ends = [turn.event.trial for turn in log_of(output) if isinstance(turn.event, Completed)]
    assert sorted(ends) == ["t-00", "t-01", "t-02"]


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


def test_an_exit_that_a_crash_cut_short_is_made_up_for(base, rows, tmp_path, monkeypatch):
    """Given up in the log, and the process gone before anything was written: it runs up to its exit
    again, from its checkpoint, and its best adapter is that of the undisturbed sweep."""
    exits = {"overfitting_gap": 0.0, "warmup": 1.0, "smoothing": 1.0}
    file = sweep_file(base, rows, early_exit=exits, search={"max_parallel": None})
    file["defaults"]["train"] |= {"max_steps": 80, "batch_size": 8}
    file["search"]["space"] = {"train.learning_rate": [5e-2]}
    file["engine"]["nano_batch_tokens"] = 256
    spec = tlora.load_sweep(file)
    expected = tlora.tune(spec, output=tmp_path / "whole", view=lines())
    assert expected.trials[0].rule == "overfitting"

    with monkeypatch.context() as patch:

        def gone(self, driver, reason):
            raise KeyboardInterrupt

        patch.setattr(running.SweepRunner, "_leave", gone)
        with pytest.raises(KeyboardInterrupt):
            tlora.tune(spec, output=tmp_path / "cut", view=lines())
    assert not (tmp_path / "cut" / "t-00" / "result.json").exists()
    shutil.rmtree(tmp_path / "cut" / "t-00" / "best")
    study = tlora.tune(spec, output=tmp_path / "cut", view=lines())
    assert study.trials == expected.trials
    for name in ("best", "adapter"):
        assert adapter_bytes(tmp_path / "cut", "t-00", name) == adapter_bytes(
            tmp_path / "whole", "t-00", name
        )
    assert sum(isinstance(t.event, Evaluated) for t in log_of(tmp_path / "cut")) == sum(
        isinstance(t.event, Evaluated) for t in log_of(tmp_path / "whole")
    )


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


def test_a_trial_that_is_resumed_goes_on_from_where_it_was_stopped(
    base, rows, tmp_path, monkeypatch
):
    """In a later session; what it did before is not done again."""
    monkeypatch.setattr(running, "LOOK_EVERY_S", 0.0)
    file = sweep_file(base, rows, exact=False, early_exit="none")
    file["search"]["space"] = {"train.learning_rate": [1e-3, 1e-2]}
    output = tmp_path / "run"
    study = tlora.tune(
        tlora.load_sweep(file), output=output, view=Asking(output, ("stop", "t-00", {}), after=12)
    )
    stopped = json.loads((output / "t-00" / "result.json").read_text())["steps"]
    assert 0 < stopped < STEPS and study.trials[0].status == "exited"
    log = StudyLog(output / "state.sqlite")
    log.request("resume", "t-00", {})
    log.close()
    begun: list[int] = []
    attach = JobDriver.attach

    def watched(driver, *given, **named):
        begun.append(driver.step)
        return attach(driver, *given, **named)

    monkeypatch.setattr(JobDriver, "attach", watched)
    again = tlora.tune(tlora.load_sweep(file), output=output, view=lines())
    assert begun == [stopped]
    assert again.trials[0].status == "completed" and again.trials[0].step == STEPS
