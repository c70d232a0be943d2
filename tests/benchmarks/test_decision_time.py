"""Plot and page of the time of a decision follow from the results."""

import importlib
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("decision_time")


def test_plot_and_page_are_of_the_last_line_of_all_sizes(script) -> None:
    line = script.last_full_line(script.RESULTS)
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.PLOT.read_text(encoding="utf-8") == script.svg(line["rows"])
    assert page == script.with_text(page, script.text(line))
    assert page != script.with_text(page, script.text(line | {"load_average": 99.0}))


def test_one_command_measures_keeps_the_line_and_writes_both(script, monkeypatch, tmp_path) -> None:
    for name in ("PLOT", "PAGE"):
        monkeypatch.setattr(script, name, tmp_path / name)
    monkeypatch.setattr(script, "SIZES", (4, 8))
    script.PAGE.write_text(f"before\n{script.BEGIN}old\n{script.END}after\n")
    results = tmp_path / "lines.jsonl"
    options = ["--sizes", "4,8", "--turns", "20", "--json", str(results), "--docs"]
    monkeypatch.setattr(sys, "argv", ["decision_time.py", *options])
    script.main()
    page, plot = script.PAGE.read_text(), script.PLOT.read_text()
    (line,) = map(json.loads, results.read_text().splitlines())
    assert page == f"before\n{script.BEGIN}{script.text(line)}{script.END}after\n"
    assert f"| 8 | 2 | {line['rows'][1]['p50_ms']:.2f} |" in page and "<polyline" in plot
    script.PLOT.unlink()
    monkeypatch.setattr(sys, "argv", ["decision_time.py", *options, "--last"])
    script.main()
    assert len(results.read_text().splitlines()) == 1
    assert (script.PAGE.read_text(), script.PLOT.read_text()) == (page, plot)
