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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--shape", "llama-9b"], "--shape: 'llama-9b' is neither one of"),
        (["--ranks", "0"], "--ranks: must be at least 1, got 0"),
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

    monkeypatch.setattr("tlora.runtime.benchmark.bench.train_together", full)
    assert tlora_command(*SMALL) == 2
    error = capsys.readouterr().err
    assert "error: --budget: out of memory (warming up: fused); take fewer tokens" in error
