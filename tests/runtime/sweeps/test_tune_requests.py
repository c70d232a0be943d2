"""What a person asks of a sweep while it runs: stop, clone, resume."""

import io
import json
import shutil
from pathlib import Path

import pytest
import yaml
from support.sweeps import STEPS, lines, sweep_file

import tlora
from tlora.runtime.sweeps import running
from tlora.runtime.sweeps.view import View
from tlora.store.study import StudyLog
from tlora.training.driver import JobDriver


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
