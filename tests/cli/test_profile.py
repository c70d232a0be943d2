"""`tlora profile`: a small real run, its file, and wrong turns."""

import pytest

from tlora.costs import JobLoad, predict, read_profile

SMALL = (
    *("profile", "--shape", "demo", "--device", "cpu", "--threads", "1", "--tokens", "256"),
    *("--repeats", "1", "--seconds", "1200"),
)


def test_a_small_run_writes_a_profile_that_predicts(tlora_command, tmp_path, capsys) -> None:
    """End to end on the demo's base: a table in 80 columns, a file that can be read, figures."""
    file = tmp_path / "cpu.json"
    assert tlora_command(*SMALL, "--output", str(file)) == 0
    profile = read_profile(file)
    assert profile.device == "cpu, 1 thread" and profile.shape == "demo"
    assert profile.dtype == "float32" and profile.skipped == ()
    assert {point.batch.rows for point in profile.points} == {64, 128, 256}
    assert sum(point.heldout for point in profile.points) >= 4
    assert all(point.seconds > 0 and point.step_seconds > 0 for point in profile.points)
    assert min(profile.attach_s, profile.detach_s, profile.warmup_s) > 0
    assert profile.memory.row_bytes is None and profile.memory.weights_bytes > 722_048 * 4
    assert "a CPU shows no peak" in profile.notes[0]
    assert profile.group_check is not None and profile.group_check.measured_s > 0
    group = predict(profile, [JobLoad(rank=4, batch_size=2, lengths=(60,))] * 3)
    assert group.tokens_per_s > 0 and group.memory_bytes is None
    captured = capsys.readouterr()
    assert all(len(row) <= 80 for row in captured.out.splitlines() if str(file) not in row)
    for part in ("backbone, per row", "Held-out error:", "A group of 8 jobs", "The knee"):
        assert part in captured.out
    assert "round 1 of 1" in captured.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--shape", "llama-9b"], "--shape: 'llama-9b' is neither one of"),
        (["--output", "."], "--output: . is a directory; name a file"),
        (["--output", "nowhere/p.json"], "--output: there is no directory nowhere"),
        (["--tokens", "8"], "--tokens: must be at least 64, got 8"),
        (["--seconds", "0"], "--seconds: must be at least 1, got 0"),
        (["--repeats", "0"], "--repeats: must be at least 1, got 0"),
        (["--dtype", "int4"], "--dtype: must be one of auto"),
        (["--device", "gpu"], "--device: 'gpu' is not a device"),
    ],
)
def test_a_wrong_turn_is_one_message_and_exit_code_two(
    args, message, tlora_command, tmp_path, monkeypatch, capsys
) -> None:
    """It names the option and says what would be right; nothing is measured or left behind."""
    monkeypatch.chdir(tmp_path)
    assert tlora_command(*SMALL, "--output", "p.json", *args) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}") and captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_refused_before_measuring(tlora_command, capsys) -> None:
    """One of the system's own, which not even root may write."""
    assert tlora_command(*SMALL, "--output", "/proc/version") == 2
    assert "error: --output: /proc/version cannot be written" in capsys.readouterr().err


def test_a_profile_needs_a_file_to_go_to(tlora_command, capsys) -> None:
    """Without --output there is nothing to do."""
    assert tlora_command("profile", "--shape", "demo") == 2
    assert "--output" in capsys.readouterr().err
