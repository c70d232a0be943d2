"""`tlora bench`: a small real run, its line, and wrong turns."""

import json
from pathlib import Path

import pytest
import torch

# The keys that programs outside rely on.
FIXED = {
    "v", "kind", "commit", "command", "device", "versions", "shape", "settings", "frozen", "fused",
    "one_at_a_time", "peft_one_by_one", "frozen_fraction", "ratio_peft", "linears",
    "linears_overhead_pct", "attach_ms", "detach_ms", "peak_bytes", "mfu", "repeats", "noise_pct",
}  # fmt: skip
SMALL = (
    *("bench", "--shape", "demo", "--device", "cpu", "--threads", "1", "--jobs", "2"),
    *("--steps", "2", "--skip-compile"),
)


@pytest.fixture
def json_file(tmp_path: Path) -> Path:
    file = tmp_path / "results.jsonl"
    file.write_text('{"kind": "older"}\n')
    return file


def test_a_small_run_gives_a_table_and_a_line_with_all_keys(
    tlora_command, json_file, capsys
) -> None:
    """One round; the line is added to what is there, and the table fits in 80 columns."""
    assert tlora_command(*SMALL, "--repeats", "1", "--json", str(json_file)) == 0
    older, line = map(json.loads, json_file.read_text().splitlines())
    assert older == {"kind": "older"}
    assert set(line) >= FIXED
    assert line["v"] == 1 and line["kind"] == "bench" and line["shape"] == "demo"
    assert set(line["frozen"]) == {"plain", "compiled", "own", "best"}
    assert line["frozen"]["compiled"] is None
    assert line["frozen"]["best"] == max(line["frozen"]["plain"], line["frozen"]["own"])
    assert set(line["linears"][0]) >= {"name", "in", "out", "ms_frozen", "ms_fused", "floor_ms"}
    fused, peft = line["fused"]["tokens_per_s"], line["peft_one_by_one"]["tokens_per_s"]
    assert line["ratio_peft"] == pytest.approx(fused / peft, rel=1e-3)
    assert line["frozen_fraction"] == pytest.approx(fused / line["frozen"]["best"], rel=1e-3)
    assert 0 < line["mfu"] < 1 and line["peak_bytes"] > 0 and line["repeats"] == 1
    captured = capsys.readouterr()
    assert all(len(row) <= 80 for row in captured.out.splitlines() if str(json_file) not in row)
    for part in ("fused / PEFT one by one:", "fused / one at a time in the same engine:"):
        assert part in captured.out
    assert "round 1 of 1: fused" in captured.err
    assert line["complete"] and {each["repeats"] for each in line["arms"].values()} == {1}
    graphs = line["graphs"]
    assert graphs["captures"] == graphs["compiled"] == 0 and graphs["warm_up_runs"] == 1
    assert graphs["attached_detached"] == graphs["attached_detached_unchanged"] > 0


def test_arms_that_are_not_asked_for_have_no_row(tlora_command, json_file, capsys) -> None:
    """Their figures are null, and the note says so; the fused one is always there."""
    assert tlora_command(*SMALL, "--repeats", "1", "--arms", "own", "--json", str(json_file)) == 0
    line = json.loads(json_file.read_text().splitlines()[-1])
    assert list(line["arms"]) == ["fused", "frozen, own"] and line["complete"]
    assert line["settings"]["arms"] == ["fused", "own"]
    assert line["one_at_a_time"]["tokens_per_s"] is line["ratio_one_at_a_time"] is None
    assert line["frozen"]["plain"] is None and line["frozen"]["best"] == line["frozen"]["own"]
    assert "left out on request: compiled, one-at-a-time, plain, peft, processes" in line["notes"]
    out = capsys.readouterr().out
    assert "one at a time, same engine" not in out and "left out on request" in out


def test_when_the_time_is_over_the_line_has_what_was_measured(
    tlora_command, json_file, monkeypatch, capsys
) -> None:
    """Loading takes all of it: one run of the fused arm, and notes on the rest."""
    clock = iter([0.0])
    monkeypatch.setattr("tlora.runtime.benchmark.bench.time.monotonic", lambda: next(clock, 1e6))
    assert tlora_command(*SMALL, "--seconds", "60", "--json", str(json_file)) == 0
    line = json.loads(json_file.read_text().splitlines()[-1])
    assert set(line) >= FIXED and not line["complete"] and line["repeats"] == 1
    assert list(line["arms"]) == ["fused"] and line["fused"]["tokens_per_s"] > 0
    assert line["frozen_fraction"] is line["drift_pct"] is line["attach_ms"] is None
    assert line["linears"] == [] and line["linears_overhead_pct"] is None
    assert "time was over: 1 of 5 rounds" in line["notes"]
    for name in ("frozen, own", "PEFT, packed", "pauses", "single linears"):
        assert f"{name}: left out, time was over" in line["notes"]
    out = capsys.readouterr().out
    assert "1 round of 5" in " ".join(out.split()) and "Note: frozen, own: left out" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--shape", "llama-9b"], "--shape: 'llama-9b' is neither one of"),
        (["--ranks", "0"], "--ranks: must be at least 1, got 0"),
        (["--ranks", "0", "--ranks", "4"], "--ranks: must be at least 1, got 0"),
        (["--batch", "x", "--batch", "2"], "--batch: must be whole numbers with commas between"),
        (["--arms", "best", "--arms", "own"], "--arms: 'best' is none of fused"),
        (["--ranks", "4096"], "--ranks: rank 4096 is larger than"),
        (["--lengths", "bad.txt"], "bad.txt:2: must be a length of 2 tokens or more, got 'many'"),
        (["--lengths", "512"], "--lengths: 512 tokens are more than the 256 positions of demo"),
        (["--json", "."], "--json: . cannot be written"),
        (["--device", "gpu"], "--device: 'gpu' is not a device"),
    ],
)
def test_a_wrong_turn_is_one_message_and_exit_code_two(
    args, message, tlora_command, tmp_path, monkeypatch, capsys
) -> None:
    """It names the option and says what would be right; nothing is measured."""
    monkeypatch.chdir(tmp_path)
    Path("bad.txt").write_text("12\nmany\n")
    assert tlora_command(*SMALL, *args) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}") and captured.out == ""


def test_a_shape_that_cannot_fit_is_refused_before_it_is_allocated(
    tlora_command, monkeypatch, capsys
) -> None:
    """With what is needed, what is free, and what would help."""
    monkeypatch.setattr("tlora.runtime.benchmark.shapes.free_bytes", lambda device: 4 * 2**30)
    assert tlora_command("bench", "--shape", "llama-8b", "--device", "cpu") == 2
    error = capsys.readouterr().err
    assert "llama-8b in float32 needs about" in error and "4.0 GiB are free" in error
    assert "--dtype bfloat16" in error


def test_memory_that_runs_out_is_said_with_what_was_under_way(
    tlora_command, monkeypatch, capsys
) -> None:
    """In one message, and what to ask for instead."""

    def full(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("tlora.runtime.benchmark.lineup.train_together", full)
    assert tlora_command(*SMALL) == 2
    error = capsys.readouterr().err
    assert "error: --budget: out of memory (warming up: fused); take fewer tokens" in error
