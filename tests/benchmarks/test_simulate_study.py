"""The study of policies, on small traces under the names of the real ones."""

import gzip
import importlib
import json
from pathlib import Path

from tlora.simulation.synthetic import synthetic_jobs, write_trace

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_a_study_goes_on_from_where_it_was(monkeypatch, tmp_path, capsys) -> None:
    """Runs that are there are not repeated; the tables name every policy and setting."""
    monkeypatch.syspath_prepend(str(FOLDER))
    script = importlib.import_module("simulate_study")
    traces = tmp_path / "traces"
    traces.mkdir()
    for name, part in script.TRACES.items():
        # Enough days for those that are skipped.
        write_trace(synthetic_jobs(400, days=part.skip_days + 10, seed=0), tmp_path / "t.csv")
        data = (tmp_path / "t.csv").read_bytes()
        (traces / f"{name}.csv.gz").write_bytes(gzip.compress(data))
    monkeypatch.setenv("TLORA_TEST_DATA", str(tmp_path))
    output = tmp_path / "lines.jsonl"
    options = ["--output", str(output), "--jobs", "12", "--seeds", "1", "--workers", "1"]
    options += ["--profile", "h200-llama-8b"]
    script.main([*options, "--policies", "solo", "--default-only"])
    first = output.read_text()
    assert len(first.splitlines()) == 2
    script.main([*options, "--policies", "solo,tlora"])
    assert output.read_text().startswith(first)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    settings = 1 + sum(map(len, script.SWEEPS.values()))
    assert len(lines) == 2 * 2 * settings == len({script.case_of(line) for line in lines})
    capsys.readouterr()
    script.main(["--output", str(output), "--table"])
    text = capsys.readouterr().out
    for part in ("### philly_2017", "| tlora |", "| solo |", "| load 1.2 |", "| gpus 32 |"):
        assert part in text
