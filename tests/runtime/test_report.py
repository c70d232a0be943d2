"""The report: whole, offline, safe, and no larger than it must be."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.run_dirs import synthetic_run
from support.runs import job_file, write_rows

from tlora.config import load_spec
from tlora.core.assets import REPORT
from tlora.core.errors import SpecError
from tlora.runtime.benchmark.landscapes import recorded
from tlora.runtime.progress import ProgressLines
from tlora.runtime.report import write_report
from tlora.runtime.report_data import jobs_running, throughput
from tlora.runtime.report_tables import job_rows
from tlora.runtime.run_log import (
    NanoBatch,
    find_sessions,
    read_decision,
    read_run,
    read_tunings,
)
from tlora.runtime.training import train
from tlora.training.controller import replay
from tlora.training.size_search import Action

VOID = {"meta", "br", "hr", "input", "link", "img", "area", "base", "col", "embed", "source", "wbr"}


class Page(HTMLParser):
    """Checks that elements are closed in order; keeps text, attributes and what is embedded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.embedded = ""
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            if self.elements[-1] == ("script", {"type": "application/json", "id": "data"}):
                self.embedded += data
        elif "style" not in self.open:
            self.text += data

    @property
    def data(self) -> dict:
        return json.loads(self.embedded)


def report_of(root: Path) -> Page:
    return Page(write_report(root).read_text())


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_real_run_leaves_a_report(base: Path, rows: Path, tmp_path: Path) -> None:
    """With the losses of its metrics and the tokens of its events."""
    data = {"path": str(rows)}
    spec = load_spec(
        job_file(
            base,
            {"name": "first", "data": data, "eval": {"split": 4}},
            {"name": "second", "data": data, "lora": {"r": 4}},
        )
    )
    root = tmp_path / "run"
    seen = tmp_path / "seen.txt"
    with seen.open("w") as out:
        train(spec, output=root, progress=ProgressLines(out))
    assert str(root / "report.html") in seen.read_text()
    page = Page((root / "report.html").read_text())
    assert "first" in page.text and "2 of 2" in page.text and "vllm serve" in page.text
    for at, job in enumerate(("first", "second")):
        records = lines_of(root / job / "metrics.jsonl")
        for kind in ("train", "eval"):
            mine = [record for record in records if record["kind"] == kind]
            drawn = page.data["jobs"][at][kind]
            assert drawn["step"] == [record["step"] for record in mine]
            assert drawn["loss"] == pytest.approx([record["loss"] for record in mine], rel=1e-5)
            assert drawn["tokens"] == [record["tokens_seen"] for record in mine]
    assert_bars_are_the_events(page, root)


def assert_bars_are_the_events(page: Page, root: Path) -> None:
    """One bar per nano-batch."""
    batches = [e for e in lines_of(root / "events.jsonl") if e["kind"] == "nano_batch"]
    bars = page.data["composition"]["whole run"]
    assert bars["each"] == 1 and bars["rows"] == [batch["rows"] for batch in batches]
    names = [job["name"] for job in page.data["jobs"]]
    found = [
        {names[j]: n for j, n in zip(bar[::2], bar[1::2], strict=True)} for bar in bars["tokens"]
    ]
    assert found == [batch["tokens"] for batch in batches]


def test_nothing_is_fetched_from_anywhere(tmp_path: Path) -> None:
    """No address, no source, no import, and a policy that forbids them."""
    root = synthetic_run(tmp_path / "run")
    text = write_report(root).read_text()
    assert not re.search(r"https?:|//[a-z]+\.|@import|\bimport\s*\(", text)
    page = Page(text)
    for tag, attributes in page.elements:
        assert not {"src", "href", "srcset", "action"} & set(attributes), (tag, attributes)
        assert tag not in {"link", "img", "iframe", "object", "embed", "base"}
    policy = [a["content"] for t, a in page.elements if "http-equiv" in a]
    assert policy and str(policy[0]).startswith("default-src 'none'")


def test_what_a_user_wrote_stays_text(tmp_path: Path) -> None:
    """In reasons, paths and settings, in tables and in the data that scripts read."""
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"more\" 'yet'"
    root = synthetic_run(tmp_path / "run", failing=["job-001"], reason=evil)
    spec = (root / "resolved.yaml").read_text()
    (root / "resolved.yaml").write_text(spec.replace("data/0.jsonl", "data/<b>0</b>.jsonl", 1))
    about = json.loads((root / "run.json").read_text())
    (root / "run.json").write_text(json.dumps({**about, "base": evil}))
    text = write_report(root).read_text()
    page = Page(text)
    assert evil in page.text and "data/<b>0</b>.jsonl" in page.text
    assert "alert(1)</script>" not in text
    assert not [tag for tag, _ in page.elements if tag == "img"]
    harmless = report_of(synthetic_run(tmp_path / "harmless"))
    assert count(page, "script") == count(harmless, "script")


def count(page: Page, tag: str) -> int:
    return sum(each == tag for each, _ in page.elements)


def test_failures_are_told_with_their_reasons(tmp_path: Path) -> None:
    """Jobs without a result too, from what they logged last."""
    root = synthetic_run(tmp_path / "run", jobs=4, failing=["job-001"], unfinished=["job-003"])
    page = report_of(root)
    assert "Did not get through" in page.text
    assert "✗ job-001" in page.text and "the loss is not finite at step 12" in page.text
    assert "2 of 4" in page.text and "1 failed, 1 unfinished" in page.text
    last = [r for r in lines_of(root / "job-003/metrics.jsonl") if r["kind"] == "train"][-1]
    assert f"{last['step']}/{last['total_steps']}" in page.text
    assert "Did not get through" not in report_of(synthetic_run(tmp_path / "well")).text


def test_the_best_of_a_job_without_a_result_is_what_it_logged(tmp_path: Path) -> None:
    """As the result would have it."""
    root = synthetic_run(tmp_path / "run", jobs=2, unfinished=["job-001"])
    found = [r for r in lines_of(root / "job-001/metrics.jsonl") if r["kind"] == "eval"]
    best = min(found, key=lambda record: record["loss"])
    row = next(row for row in job_rows(read_run(root)) if row.name == "job-001")
    assert (row.best_eval_loss, row.best_step) == (best["loss"], best["step"])


def test_what_a_person_cancelled_is_no_failure(tmp_path: Path) -> None:
    """It is counted, and not among those that did not get through."""
    root = synthetic_run(tmp_path / "run", jobs=2, failing=["job-001"])
    assert "Did not get through" in report_of(root).text
    path = root / "job-001" / "result.json"
    path.write_text(path.read_text().replace('"failed"', '"cancelled"'))
    text = report_of(root).text
    assert "1 cancelled" in text and "Did not get through" not in text


def test_settings_that_differ_are_shown_side_by_side(tmp_path: Path) -> None:
    """And marked where they are not the default; the others are listed once."""
    text = write_report(synthetic_run(tmp_path / "run", jobs=4)).read_text()
    columns = re.search(r'id="settings">\s*<thead>(.*?)</thead>', text, re.S)
    assert columns and re.findall(r">([a-z_.]+)</th>", columns[1]) == [
        *("job", "data.path", "lora.r", "train.learning_rate", "eval.split")
    ]
    assert '<td data-key="64.0" class="differs">64</td>' in text
    assert '<td data-key="16.0">16</td>' in text
    assert "default: none" in text and "train.max_steps" in text


@pytest.mark.slow
def test_a_hundred_jobs_and_20000_nano_batches_stay_small(tmp_path: Path) -> None:
    """Curves and bars are thinned; sums stay right."""
    root = synthetic_run(tmp_path / "run", jobs=100, nano_batches=40_000, sharing=7)
    page = report_of(root)
    log = read_run(root)
    assert len(log.nano_batches) > 20_000
    assert (root / "report.html").stat().st_size < 3_000_000
    view = page.data["composition"]["whole run"]
    assert len(view["rows"]) <= 240 and view["count"] == len(log.nano_batches)
    drawn = sum(sum(bar[1::2]) for bar in view["tokens"]) * view["each"]
    real = sum(sum(batch.tokens.values()) for batch in log.nano_batches)
    assert drawn == pytest.approx(real, rel=0.01)
    assert len(page.data["throughput"]["time"]) <= 200
    curve = page.data["jobs"][0]["train"]
    mine = [record["loss"] for record in log.jobs[0].train]
    assert curve["each"] > 1 and len(curve["loss"]) <= 400
    assert curve["loss"][0] == pytest.approx(sum(mine[: curve["each"]]) / curve["each"], rel=1e-5)


def test_a_stop_takes_no_time(tmp_path: Path) -> None:
    """A run that lay a day and went on: the day is cut out, the place is marked."""
    plain = report_of(synthetic_run(tmp_path / "plain")).data
    resumed = report_of(synthetic_run(tmp_path / "resumed", resumed_at=50)).data
    assert plain["resumed"] == [] and len(resumed["resumed"]) == 1
    assert resumed["throughput"]["time"] == pytest.approx(plain["throughput"]["time"], abs=0.3)
    assert min(resumed["throughput"]["useful"]) > 0.5 * min(plain["throughput"]["useful"])


@pytest.mark.parametrize("count", [30, 500])
def test_nano_batches_of_ranks_that_end_together_make_no_spikes(tmp_path: Path, count: int) -> None:
    """Two ranks at 1,000 tokens/s each, in turns of 0.2 s that end a few milliseconds apart and in
    any order; the second has nothing to do in every fifth."""
    batches = [
        NanoBatch(
            0.2 * turn + late,
            250,
            {"a": 200},
            evaluation=False,
            broke_off=False,
            device=rank,
            seconds=0.19,
        )
        for turn in range(1, count + 1)
        for rank, late in zip((1, 0) if turn % 3 else (0, 1), (0.0, 0.004), strict=True)
        if rank == 0 or turn % 5
    ]
    log = replace(read_run(synthetic_run(tmp_path / "run", jobs=1)), nano_batches=batches)
    drawn = throughput(log)
    assert drawn["of"] == "turn"
    assert min(rates(drawn)) > 900 and max(rates(drawn)) < 2100
    # On one device they would be turns of their own, and some of these very short.
    alone = throughput(replace(log, nano_batches=[replace(each, device=None) for each in batches]))
    assert alone["of"] == "nano-batch"
    assert max(rates(alone)) > (2400 if count > 100 else 40_000)


def rates(drawn: dict[str, object]) -> list[float]:
    found = drawn["useful"]
    assert isinstance(found, list) and len(found) >= 30
    return found


def test_a_run_whose_size_was_tuned_shows_how(tmp_path: Path) -> None:
    """Sizes, speeds and decisions; a run of one size has no such picture."""
    landscape = recorded("1B with adapters, eager")
    root = synthetic_run(tmp_path / "run", tuned=landscape, nano_batches=120)
    page = report_of(root)
    tuning = page.data["tuning"]
    events = lines_of(root / "events.jsonl")
    decided = [event for event in events if event["kind"] == "tuned"]
    assert [mark["action"] for mark in tuning["marks"]] == [event["action"] for event in decided]
    assert [mark["budget"] for mark in tuning["marks"]] == [event["budget"] for event in decided]
    assert tuning["budget"][0] == 2048 and set(tuning["budget"]) == {2048, 4096, 8192}
    for size, rate in zip(tuning["budget"], tuning["rate"], strict=True):
        assert rate == pytest.approx(landscape.rate(size, 0.0), rel=0.05)
    assert "Size of nano-batches" in page.text
    plain = report_of(synthetic_run(tmp_path / "plain"))
    assert plain.data["tuning"] is None and "Size of nano-batches" not in plain.text


def test_every_decision_on_a_size_has_a_sign() -> None:
    """In the picture, where one without would be nothing."""
    script = (REPORT / "tuning.js").read_text()
    [table] = re.findall(r"const SIGNS = \{(.*?)\};", script, re.DOTALL)
    signs = dict(re.findall(r'"?(\w[\w ]*)"?: "(.)"', table))
    assert signs.keys() == {action.value for action in Action}
    assert len(set(signs.values())) == len(signs)


def test_the_decisions_of_a_real_run_can_be_replayed(base: Path, tmp_path: Path) -> None:
    """From events.jsonl alone, one for one, over a run that went on with another job."""
    data = {"path": str(write_rows(tmp_path / "rows.jsonl", 200))}
    jobs = [{"name": name, "data": data} for name in ("first", "second")]
    train_settings = {"max_steps": 6, "batch_size": 100, "max_length": 64, "learning_rate": 1e-3}
    for at in (1, 2):
        file = job_file(base, *jobs[:at])
        file["defaults"] = {"lora": {"r": 2, "lora_alpha": 4}, "train": train_settings}
        file["engine"] = {"device": "cpu", "nano_batch_tokens": "tuned"}
        with (tmp_path / "seen.txt").open("w") as out:
            train(load_spec(file), output=tmp_path / "run", progress=ProgressLines(out))
    assert "found by measuring" in (tmp_path / "seen.txt").read_text()
    events = lines_of(tmp_path / "run" / "events.jsonl")
    sessions = list(read_tunings(events))
    assert len(sessions) == 2
    decided = [read_decision(event) for event in events if event["kind"] == "tuned"]
    replayed = [each for settings, told in sessions for each in replay(settings, told)]
    assert decided and replayed == decided
    shorter = [each for settings, told in sessions for each in replay(settings, told[1:])]
    assert shorter != decided


def test_both_themes_are_there(tmp_path: Path) -> None:
    """Every colour has a light and a dark value, and a person may choose."""
    text = write_report(synthetic_run(tmp_path / "run")).read_text()
    colours = re.findall(r"--([a-z0-9-]+): light-dark\(#[0-9a-f]{6}, #[0-9a-f]{6}\)", text)
    assert {"ground", "card", "ink", "line", *(f"c{at}" for at in range(8))} <= set(colours)
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", text))
    assert used <= set(colours)
    assert ':root[data-theme="dark"]' in text and 'id="theme"' in text


def test_old_broken_and_empty_runs_have_reports(tmp_path: Path) -> None:
    """A line cut short, a NaN, files that are missing, results from before a field was added."""
    root = synthetic_run(tmp_path / "run")
    with (root / "events.jsonl").open("a") as file:
        file.write('{"v": 1, "kind": "nano_ba')
    with (root / "job-000/metrics.jsonl").open("a") as file:
        record = lines_of(root / "job-000/metrics.jsonl")[-1]
        file.write(json.dumps({**record, "kind": "train", "loss": float("nan")}) + "\n")
    result = json.loads((root / "job-001/result.json").read_text())
    del result["serving"]
    (root / "job-001/result.json").write_text(json.dumps(result))
    assert report_of(root).data["jobs"][0]["train"]["loss"][-1] is None
    for name in ("events.jsonl", "resolved.yaml", "job-000/metrics.jsonl", "job-002/result.json"):
        (root / name).unlink()
        assert "job-000" in report_of(root).text
    with pytest.raises(SpecError, match="not the directory of a run"):
        write_report(tmp_path)


def test_a_job_that_comes_before_the_run_is_told_to_begin_cuts_nothing() -> None:
    """Workers note by themselves, and the process that leads may be late. What was trained before
    ends an earlier session."""

    def seen(*kinds: str) -> list[dict[str, object]]:
        return [{"kind": kind, "time": float(time)} for time, kind in enumerate(kinds)]

    late = ("joined", "joined", "began", "nano_batch", "joined", "nano_batch")
    assert find_sessions(seen(*late)).wall == [0.0]
    assert find_sessions(seen(*late, "began", "nano_batch")).wall == [0.0, 6.0]


def test_who_waits_for_a_place_is_not_counted_as_running(tmp_path: Path) -> None:
    """A run that was killed with two jobs at work goes on with one of them at a time."""
    moves = [("attached", "a"), ("attached", "b"), ("attached", "a"), ("waits", "b")]
    events = [{"kind": kind, "job": job, "time": float(at)} for at, (kind, job) in enumerate(moves)]
    (tmp_path / "run.json").write_text(json.dumps({"jobs": ["a", "b"]}))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    log = read_run(tmp_path)
    assert jobs_running(log, [log.attendance[1].at + 1e-3])[0] == 2
    assert jobs_running(log, [log.attendance[-1].at + 1e-3])[0] == 1
