"""`tlora verify`."""

from pathlib import Path


def test_the_lines_of_the_check_are_printed(runtime, tlora_command, capsys) -> None:
    """For the adapter's own base, or the one given."""
    assert tlora_command("verify", "runs/x/a/adapter") == 0
    assert tlora_command("verify", "runs/x/a/adapter", "--base", "org/model") == 0
    path = Path("runs/x/a/adapter")
    assert runtime.calls == [(path, None), (path, "org/model")]
    assert capsys.readouterr().out.splitlines() == ["keys match", "logits match"] * 2
