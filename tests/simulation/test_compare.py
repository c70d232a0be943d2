"""A comparison: its JSON, its table, its report."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tlora.core.errors import SpecError
from tlora.simulation import table
from tlora.simulation.compare import Comparison, Setting, choose_profile, compare, mean_of
from tlora.simulation.plots import binned, gantt_bars
from tlora.simulation.report import render, table_lines, write_report
from tlora.simulation.synthetic import synthetic_jobs
from tlora.simulation.traces import Given, Trace, TraceJob
from tlora.simulation.world import World

TRACE = Trace("made<up>", tuple(synthetic_jobs(60, days=1, seed=2)))
KEYS = {
    "jct_s": {"mean", "p50", "p95", "p99"},
    "queue_s": {"mean", "p50", "p95", "p99"},
    "slowdown": {"p95", "max"},
    "ftf": {"p95", "max"},
    "decision_ms": {"p50", "p99"},
}
PLAIN = (
    *("makespan_s", "tokens_per_s", "samples_per_s", "util_busy", "util_effective", "regroups"),
    *("regroup_s", "cut_misses", "jobs_done", "jobs_failed"),
)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    world = World(gpu_mtbf_s=50 * 3600)
    return compare(
        Setting(trace=TRACE, policies=("tlora", "solo"), gpus=8, seeds=2, load=1.0, world=world)
    )


def test_the_json_has_the_keys_that_others_read(comparison) -> None:
    """Every figure is a number, per seed too; it survives strict JSON."""
    found = json.loads(json.dumps(comparison.as_json(), allow_nan=False))
    top = {"v": 1, "kind": "simulate", "trace": "made<up>", "gpus": 8, "seeds": 2}
    assert found.items() >= top.items() and found["load"] == pytest.approx(1.0)
    assert found["predictor_error"] == 0 and found["profile"] == "h200-llama-8b"
    assert [each["seed"] for each in found["per_seed"]] == [0, 1]
    for policies in (found["policies"], *(each["policies"] for each in found["per_seed"])):
        assert set(policies) == {"tlora", "solo"}
        for figures in policies.values():
            for name, parts in KEYS.items():
                assert set(figures[name]) == parts
            numbers = [figures[name] for name in PLAIN]
            numbers += [value for name in KEYS for value in figures[name].values()]
            assert all(isinstance(value, int | float) for value in numbers)


def test_seeds_are_averaged_but_for_the_largest(comparison) -> None:
    """A largest value is the largest of all; what one seed lacks is not known."""
    one = {"a": 1.0, "b": {"p95": 2.0, "max": 3.0}, "c": None}
    two = {"a": 2.0, "b": {"p95": 4.0, "max": 5.0}, "c": 1.0}
    assert mean_of([one, two]) == {"a": 1.5, "b": {"p95": 3.0, "max": 5.0}, "c": None}
    seeds = comparison.as_json()["per_seed"]
    means = [each["policies"]["solo"]["jct_s"]["mean"] for each in seeds]
    assert means[0] != means[1]
    assert comparison.mean("solo")["jct_s"]["mean"] == pytest.approx(np.mean(means))


def test_policies_meet_the_same_jobs_and_the_same_world(comparison) -> None:
    """Arrivals, steps and failures are equal."""
    ours, theirs = comparison.first["tlora"], comparison.first["solo"]
    assert [each.request for each in ours.recorder.jobs.values()] == [
        each.request for each in theirs.recorder.jobs.values()
    ]
    assert ours.world == theirs.world and ours.world


def test_the_tables_fit_80_columns_and_the_sentences_compare(comparison) -> None:
    """However large the figures."""
    for each in (table.times(comparison), table.use(comparison)):
        widths = [max(map(len, column)) for column in zip(each.header, *each.rows, strict=True)]
        widths[0] = max(widths[0], len("tlora-no-scheduler"))
        assert sum(widths) + 2 * (len(widths) - 1) <= 80
    text = "\n".join([*table.title(comparison), *table.sentences(comparison)])
    for part in ("made<up>: 60 jobs on 8 GPUs, load 1.00", "tlora against solo: mean JCT"):
        assert part in text


def test_who_is_slower_is_not_called_faster(comparison) -> None:
    """The sentence has one word or the other, and no ratio below one with it."""
    (line,) = (
        line for line in table.sentences(comparison) if line.startswith("tlora against solo")
    )
    means = dict(table._means(comparison))
    for which, part in zip(("mean", "p99"), line.split(": ")[1].split(", ")[:2], strict=True):
        ours, theirs = (means[policy]["jct_s"][which] for policy in ("tlora", "solo"))
        word = "shorter" if ours <= theirs else "longer"
        assert part.endswith(f" {max(ours, theirs) / min(ours, theirs):.2f}x {word}")
    two, three = ({"jct_s": {"mean": seconds}} for seconds in (2.0, 3.0))
    assert table._shorter(two, three, "mean") == "1.50x shorter"
    assert table._shorter(three, two, "mean") == "1.50x longer"


def of_one(rank: int) -> Comparison:
    job = TraceJob("only", 0.0, None, 1, given=Given(steps=9, rank=rank, batch=1, length=512))
    return compare(Setting(trace=Trace("one", (job,)), policies=("tlora", "solo"), gpus=2))


def test_who_is_refused_is_named_with_the_reason() -> None:
    """Ours did the job and solo refused it: nothing is compared with what was never done."""
    done, refused = of_one(8), of_one(100_000)
    found = replace(
        done,
        metrics={"tlora": done.metrics["tlora"], "solo": refused.metrics["solo"]},
        first={"tlora": done.first["tlora"], "solo": refused.first["solo"]},
    )
    lines = table.sentences(found)
    assert not any("against solo" in line for line in lines)
    assert lines[-1] == (
        "solo: 1 job was refused or failed; only: it does not fit even alone; bound by memory."
    )
    assert table.title(found)[0].startswith("one: 1 job on 2 GPUs")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0, "0.0 s"), (42.4, "42 s"), (90, "1.5 min"), (7200, "2.0 h"), (2e5, "2.3 d")],
)
def test_durations_say_their_unit(seconds, text) -> None:
    """Never more than three digits before it up to a thousand days."""
    assert table.duration(seconds) == text


def test_means_over_slices_are_exact() -> None:
    """Two intervals over four slices, worked out by hand; a shifted one is not the same."""
    edges = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    found = binned([0.5, 1.0], [2.5, 3.0], [2.0, 10.0], edges)
    assert found == pytest.approx([1.0, 12.0, 11.0, 0.0])
    assert binned([0.6, 1.0], [2.5, 3.0], [2.0, 10.0], edges) != pytest.approx(found)
    assert binned([], [], [], edges) == pytest.approx([0, 0, 0, 0])


def test_bars_cover_what_groups_held(comparison) -> None:
    """GPU-seconds of the bars are those of the stretches; neighbours that look alike are one."""
    stretches = comparison.first["tlora"].recorder.stretches
    bars = gantt_bars(stretches)
    held = sum((each.end - each.start) * len(each.gpus) for each in stretches)
    assert sum((bar.end - bar.start) * bar.gpus for bar in bars) == pytest.approx(held)
    one = replace(stretches[0], gpus=(3, 4, 7), start=0.0, trains_from=0.0, end=5.0)
    two = replace(one, start=5.0, trains_from=5.0, end=9.0)
    assert [(bar.first_gpu, bar.gpus, bar.end) for bar in gantt_bars([one, two])] == [
        (3, 2, 9.0),
        (7, 1, 9.0),
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"policies": ("best",)}, "--policy: 'best' is none of"),
        ({"policies": ()}, "--policy: name at least one"),
        ({"policies": ("solo", "solo")}, "--policy: names one twice"),
        ({"gpus": 0}, "--gpus: must be at least 1"),
        ({"seeds": 0}, "--seeds: must be at least 1"),
        ({"per_node": 0}, "--per-node: must be at least 1"),
        ({"predictor_error": -0.1}, "--predictor-error: must be between 0 and 2"),
        ({"predictor_error": float("nan")}, "--predictor-error: must be between 0 and 2"),
        ({"trace": Trace("t", ())}, "--skip-days, --days: leaves no job"),
    ],
)
def test_a_wrong_setting_names_the_option(wrong, message) -> None:
    """Before anything is run."""
    with pytest.raises(SpecError, match=re.escape(message)):
        Setting(**{"trace": TRACE} | wrong)


def test_a_profile_is_found_by_name_or_file(tmp_path) -> None:
    """And where it is neither, that is said."""
    name, profile = choose_profile("h200-llama-1b")
    assert name == "h200-llama-1b" and profile.points
    assert choose_profile(None) == choose_profile("h200-llama-8b")
    with pytest.raises(
        SpecError, match=r"--profile: 'h300' is neither a file nor one of cpu.*h200"
    ):
        choose_profile("h300")


def test_the_report_is_whole_without_a_script(comparison, tmp_path) -> None:
    """All figures are in the table; names are escaped; nothing is fetched."""
    page = render(comparison)
    assert "made&lt;up&gt;" in page and "made<up>" not in page
    for part in ("job completion time, mean", "finish-time fairness, largest", "a GPU fails every"):
        assert part in page
    assert not re.search(r'(src|href)="', page)
    with pytest.raises(SpecError, match=r"--html: .* cannot be written"):
        write_report(comparison, tmp_path / "none" / "r.html")


def test_the_best_is_marked_only_where_there_is_a_choice(comparison) -> None:
    """Of two policies one; a policy by itself is not the best of anything."""
    assert any(any(line.best) for line in table_lines(comparison))
    alone = replace(comparison, setting=replace(comparison.setting, policies=("tlora",)))
    assert not any(any(line.best) for line in table_lines(alone))


@pytest.mark.browser
def test_the_report_is_drawn_in_a_browser(comparison, tmp_path) -> None:
    """A curve per policy in every plot, bars for groups and outages, none left after a click."""
    chromium = shutil.which("chromium")
    if chromium is None and not os.environ.get("CI"):
        pytest.skip("chromium is not installed: make system-deps")
    assert chromium is not None, "chromium is not installed: make system-deps"
    page = tmp_path / "r.html"
    write_report(comparison, page)
    watch = (
        '<script>addEventListener("error", (event) => '
        "{ document.documentElement.dataset.error = event.message; });</script>"
    )
    click = '<script>document.querySelectorAll("#shown button")[1].click();</script>'
    text = page.read_text().replace("<head>", f"<head>{watch}", 1)
    page.write_text(text.replace("</body>", f"{click}</body>"))
    dom = opened(chromium, page, tmp_path / "profile")
    assert 'data-drawn="yes"' in dom and "data-error" not in dom
    for name in ("jct", "busy", "effective", "waiting"):
        assert len(re.findall(r'class="curve', figure(dom, name))) == 2
    gantt = figure(dom, "gantt")
    assert "under solo" in gantt and gantt.count("var(--g1)") >= 60
    assert 'class="down"' in gantt and "var(--g2)" not in gantt, "solo has one job in a group"


@pytest.mark.browser
def test_jobs_that_wait_are_counted_in_whole_numbers(tmp_path) -> None:
    """Nobody waits: the axis has 0 and 1, each once."""
    chromium = shutil.which("chromium")
    if chromium is None and not os.environ.get("CI"):
        pytest.skip("chromium is not installed: make system-deps")
    assert chromium is not None, "chromium is not installed: make system-deps"
    page = tmp_path / "r.html"
    write_report(of_one(8), page)
    waiting = figure(opened(chromium, page, tmp_path / "profile"), "waiting")
    assert re.findall(r'text-anchor="end">(\w+)<', waiting) == ["0", "1"]


def opened(chromium: str, page: Path, profile: Path) -> str:
    command = (
        *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--disable-sync", "--disable-background-networking", "--disable-component-update"),
        *("--window-size=1200,900", f"--user-data-dir={profile}", "--dump-dom", page.as_uri()),
    )
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout


def figure(dom: str, name: str) -> str:
    found = re.search(rf'<figure id="{name}">(.*?)</figure>', dom, re.S)
    assert found is not None
    return found[1]
