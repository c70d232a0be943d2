"""A sweep that is stopped, killed or cut short goes on and loses nothing; another is refused."""

import shutil
import sqlite3
from pathlib import Path

import pytest
from support.kills import adapter_bytes, carry_out
from support.runs import job_file
from support.sweeps import StopAfter, lines, log_of, same_end, sweep_file

import tlora
from tlora.core.errors import SpecError
from tlora.runtime.sweeps import running
from tlora.runtime.sweeps.tasks import tune_on_devices
from tlora.store.study import StudyLog
from tlora.training.checkpoint import checkpoint_name
from tlora.training.engine import Engine
from tlora.tuning.events import Completed, Evaluated, Exit


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


@pytest.mark.parametrize("saved_every", [3, 2])
def test_an_exit_that_a_crash_cut_short_is_made_up_for(
    saved_every, base, rows, tmp_path, monkeypatch
):
    """Given up in the log, and the process gone before its best adapter was written: it runs up to
    its exit again, from its checkpoint, and its best adapter is that of the undisturbed sweep. One
    of the very step that it went at may be from before the evaluation."""
    exits = {"overfitting_gap": 0.0, "warmup": 1.0, "smoothing": 1.0}
    file = sweep_file(base, rows, early_exit=exits, search={"max_parallel": None})
    file["defaults"]["train"] |= {"max_steps": 80, "batch_size": 8}
    file["search"]["space"] = {"train.learning_rate": [5e-2]}
    file["defaults"]["save"]["steps"] = saved_every
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
    exited = checkpoint_name(expected.trials[0].step)
    assert (tmp_path / "cut/t-00/checkpoints" / exited).exists() == (saved_every == 2)
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


@pytest.mark.parametrize(
    "way", ["one process", pytest.param("workers", marks=pytest.mark.multi_process)]
)
def test_an_end_whose_value_nobody_logged_is_come_to_again(way, base, rows, tmp_path):
    """Without held-out rows a trial is worth its training loss, which a worker tells with its end:
    its files may be on disk and neither in the log. It goes on from its checkpoint to the same."""
    file = sweep_file(base, rows, early_exit={"method": "none"}, search={"max_parallel": None})
    file["defaults"] |= {"eval": {}}
    file["search"] |= {"objective": {"metric": "loss"}}
    file["search"]["space"] = {"train.learning_rate": [1e-3, 1e-2]}
    spec, output = tlora.load_sweep(file), tmp_path / "run"
    expected = tlora.tune(spec, output=output, view=lines())
    assert all(trial.value is not None for trial in expected.trials)
    with sqlite3.connect(output / "state.sqlite") as log:
        log.execute("DELETE FROM study WHERE trial = 't-01'")
    if way == "one process":
        found = tlora.tune(spec, output=output, view=lines())
    else:
        found = tune_on_devices([spec], output=output, devices=1, view=lines()).only
    assert found.trials == expected.trials and found.best == expected.best


def test_an_evaluation_that_could_not_be_logged_is_told_when_the_sweep_goes_on(
    base, rows, swept, tmp_path, monkeypatch
):
    """Whoever is whole is saved when the log breaks, after its evaluation: it is not lost."""
    spec, output = tlora.load_sweep(sweep_file(base, rows)), tmp_path / "run"
    append = StudyLog.append

    def full(self, event, actions, task=None):
        if isinstance(event, Evaluated) and event.trial == "t-01":
            raise sqlite3.OperationalError("database or disk is full")
        append(self, event, actions, task)

    with monkeypatch.context() as patch:
        patch.setattr(StudyLog, "append", full)
        with pytest.raises(sqlite3.OperationalError):
            tlora.tune(spec, output=output, view=lines())
    assert (output / "t-01/checkpoints" / checkpoint_name(2)).is_dir()
    tlora.tune(spec, output=output, view=lines())
    same_end(output, swept)
    told_once(output)
