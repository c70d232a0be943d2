"""The report of a sweep: what is drawn, from a log made up by hand, and in a real browser."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tlora.runtime.sweeps.report import headlines, write_sweep_report
from tlora.runtime.sweeps.report_data import axes_of, course, fate, saving
from tlora.runtime.sweeps.view import closing_lines
from tlora.store.study import StudyLog, StudyTurn
from tlora.tuning.events import Added, Closed, Completed, Evaluated, Event, Failed, TrialPlan
from tlora.tuning.results import Study

TRIALS = {
    "a": {"train.learning_rate": 1e-3, "lora.target_modules": ["q_proj"]},
    "b": {"train.learning_rate": 1e-1, "lora.target_modules": "all-linear"},
    "c": {"train.learning_rate": 1e-2, "lora.r": 4},
}


def evaluated(trial: str, step: int, loss: float) -> Evaluated:
    metrics = {"eval_loss": loss, "loss": loss + 0.1}
    return Evaluated(trial=trial, step=step, tokens=10 * step, metrics=metrics)


EVENTS: list[Event] = [
    Added(
        tuple(
            TrialPlan(
                name=name,
                params=params,
                total_steps=10,
                total_tokens=100,
                batch_size=1,
                adapter_bytes=1.0,
            )
            for name, params in TRIALS.items()
        )
    ),
    Closed(),
    evaluated("a", 1, 3.0),
    evaluated("b", 1, 2.0),
    Failed(trial="b", step=2, tokens=20, reason="the loss is <b>not</b> finite"),
    evaluated("a", 5, 2.5),
    evaluated("a", 10, 2.7),
    Completed(trial="a", step=10, tokens=100),
]


def trial(name: str, status: str, value: float | None, rule: str | None = None, **more) -> dict:
    return {
        "name": name,
        "params": TRIALS[name],
        "status": status,
        "reason": more.pop("reason", None),
        "rule": rule,
        "numbers": {"gap": 0.2, "best": None} if rule else {},
        "step": 1,
        "total_steps": 10,
        "value": value,
        "tokens_seen": more.pop("tokens", 10),
    }


STUDY = {
    "v": 1,
    "kind": "study",
    "over": True,
    "best": {"name": "a", "params": TRIALS["a"], "value": 2.5},
    "trials": [
        trial("a", "completed", 2.5, tokens=100),
        trial("b", "failed", 2.0, tokens=20, reason="the loss is <b>not</b> finite"),
        trial("c", "exited", 4.0, "overfitting", reason="overfitting at step 1: too wide"),
    ],
    "objective": {"metric": "eval_loss", "mode": "min"},
    "early_exit": "alto",
    "tokens_spent": 130,
    "tokens_full": 300,
    "saved_fraction": 0.567,
    "saved_by_exit": 0.3,
    "wall_s": 12.0,
    "winner": {"adapter": "x/winner/adapter", "job_file": "x/job.yaml", "command": "tlora train x"},
    "fusion": {"together_rate": 20.0, "alone_rate": 5.0},
}


def turns() -> list[StudyTurn]:
    return [StudyTurn(1, float(at), event, []) for at, event in enumerate(EVENTS)]


def test_the_best_so_far_by_hand() -> None:
    """3 at 10 tokens, 2 at 20, then b fails and a's 3 is the best again; a's worse third
    evaluation does not unmake its second, whose adapter is kept."""
    found = course(STUDY, turns())
    assert found["tokens"] == [10, 20, 30, 70, 120]
    assert found["value"] == [3.0, 2.0, 3.0, 2.5, 2.5]
    assert found["trial"] == ["a", "b", "a", "a", "a"]


def test_fates_and_savings_by_hand() -> None:
    """300 tokens one at a time take 60 s; 130 take 26 s, together 6.5 s."""
    assert [fate(each, "a") for each in STUDY["trials"]] == ["winner", "failed", "overfitting"]
    found = saving(STUDY)
    assert found["by_fate"] == [["winner", 100], ["overfitting", 10], ["failed", 20]]
    assert found["times"] == {"alone_full": 60.0, "alone": 26.0, "together": 6.5}


def test_axes_are_numbers_on_a_scale_or_words() -> None:
    """Rates over two powers of ten are on a logarithmic one; lists are words."""
    axes = {axis["name"]: axis for axis in axes_of(STUDY["trials"])}
    assert axes["train.learning_rate"]["kind"] == "log"
    assert axes["lora.target_modules"]["words"] == ["all-linear", "q_proj"]
    assert axes["lora.r"] == {"name": "lora.r", "kind": "linear", "low": 4, "high": 4}


@pytest.fixture
def page(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    root.mkdir()
    about = {"base": "demo", "device": "cpu", "isolation": "default", "started": 0.0}
    (root / "run.json").write_text(json.dumps(about))
    (root / "study.json").write_text(json.dumps(STUDY))
    log = StudyLog(root / "state.sqlite")
    spec = {
        "task": {"name": "t"},
        "search": {"sampler": "grid", "seed": 0},
        "early_exit": {"method": "alto", "keep": 0.25},
    }
    log.begin({"spec": spec})
    for event in EVENTS:
        log.append(event, [])
    log.close()
    return write_sweep_report(root)


def test_the_tables_can_be_read_without_a_script(page: Path) -> None:
    """Leaderboard, reasons with their numbers, the command; text of the run is text, not HTML."""
    text = page.read_text()
    for words in ("tlora train x", "overfitting at step 1: too wide", "gap 0.2, best -", "keep"):
        assert words in text
    assert "the loss is &lt;b&gt;not&lt;/b&gt; finite" in text and "<b>not</b>" not in text
    places = re.findall(r'<td class="n place"[^>]*>(\d*)</td>\s*<th scope="row">(\w)</th>', text)
    assert places == [("1", "a"), ("2", "c"), ("", "b")]


@pytest.mark.browser
def test_the_report_of_a_sweep_is_drawn_in_a_browser(page: Path, tmp_path: Path) -> None:
    """Curves, course, parallel axes and bars, without an error; a click hides a fate."""
    chromium = shutil.which("chromium")
    if chromium is None and not os.environ.get("CI"):
        pytest.skip("chromium is not installed: make system-deps")
    assert chromium is not None, "chromium is not installed: make system-deps"
    watch = """<script>addEventListener("error", (event) => {
        document.documentElement.dataset.error = event.message; });</script>"""
    click = '<script>document.querySelector("#fates button:last-child").click();</script></body>'
    text = page.read_text().replace("<head>", f"<head>{watch}", 1).replace("</body>", click)
    page.write_text(text)
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync")
    command = [chromium, *quiet, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=600)
    dom = done.stdout
    assert 'data-drawn="yes"' in dom and "data-error" not in dom
    figures = dict(re.findall(r'<figure id="(\w+)">(.*?)</figure>', dom, re.S))
    assert figures["curves"].count('class="curve') == 1, "b failed and was hidden, c has no curve"
    assert figures["parallel"].count('class="curve') == 2
    assert 'class="course"' in figures["course"] and figures["saving"].count("<rect") == 7


def study_of(**figures: Any) -> Study:
    return Study(
        output=Path("run"),
        trials=[],
        best=None,
        metric="eval_loss",
        mode="min",
        method="alto",
        wall_s=1.0,
        **figures,
    )


def test_what_is_not_trained_yet_is_not_called_saved():
    """In the report and in the closing lines of a sweep that was stopped."""
    over, stopped = (headlines({**STUDY, "over": each}) for each in (True, False))
    assert ("saved by early exit", "30%") in [(each.label, each.figure) for each in over]
    assert "saved by early exit" not in [each.label for each in stopped]
    assert "trained so far" in [each.label for each in stopped]
    study = study_of(
        tokens_spent=10, tokens_full=40, tokens_given_up=30, interrupted=True, over=False
    )
    assert "10 tokens trained of 40" in closing_lines(study)
    done = replace(study, interrupted=False, over=True)
    assert "10 tokens trained of 40: early exit saved 75%" in closing_lines(done)


def test_what_failures_and_stops_left_is_not_called_saved_by_early_exit():
    """Of 300 tokens 70 were trained; rules left 90, and the others 140."""
    study = study_of(tokens_spent=70, tokens_full=300, tokens_given_up=90)
    told = "early exit saved 30%, and 47% was left by trials that failed or were stopped"
    assert f"70 tokens trained of 300: {told}" in closing_lines(study)
    assert study.as_json()["saved_by_exit"] == 0.3
    assert saving(STUDY)["others"] and not saving({**STUDY, "saved_by_exit": 0.567})["others"]
