"""The command as the shell sees it: speed, exit codes, one message per error."""

import resource
import subprocess
import sys

import pytest

import tlora
from tlora.cli import main as cli
from tlora.core.errors import (
    AdapterError,
    DataError,
    JobFailed,
    ModelError,
    SpecError,
    SpecErrors,
)

VERBS = [
    "demo",
    "train",
    "submit",
    "check",
    "preview",
    "verify",
    "merge",
    "schema",
    "bench",
    "profile",
]
BUDGET_SECONDS = 1.0

PROBE = """
import sys
from tlora.cli.main import main
try:
    main(sys.argv[1:])
finally:
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    assert not heavy, heavy
"""


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    code = caught.value.code
    return code if isinstance(code, int) else 0


def raising(error: BaseException):
    def load(source: object, overrides: object) -> None:
        raise error

    return load


def child_seconds() -> float:
    """Of processor time, which a busy machine does not stretch as it does the clock's."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("args", [["--help"], *([verb, "--help"] for verb in VERBS)])
def test_help_answers_at_once_and_without_torch(args: list[str]) -> None:
    """Well under a second of work; torch alone would take several."""
    before = child_seconds()
    done = subprocess.run([sys.executable, "-c", PROBE, *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage: tlora" in done.stdout
    assert child_seconds() - before < BUDGET_SECONDS


def test_every_verb_and_option_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    """No line of the help ends with its name."""
    run("--help")
    listed = capsys.readouterr().out
    assert all(verb in listed for verb in VERBS)
    run("train", "--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for part in ("A job file", "runs/<file stem>", "Set a field", "same bits", "Start over"):
        assert part in text


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard output, for scripts."""
    assert run("--version") == 0
    assert capsys.readouterr().out == f"tlora {tlora.__version__}\n"


def test_a_mistyped_verb_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    """And the exit code of bad input."""
    assert run("trian", "jobs.yaml") == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["train"], ["train", "x", "--nope"], ["train", "--isolation"]])
def test_bad_usage_exits_with_two(args: list[str]) -> None:
    """Like every other bad input."""
    assert run(*args) == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError("wrong", job="a", field="lora.r"), 2),
        (SpecErrors([SpecError("one"), SpecError("two [bold]")]), 2),
        (DataError("wrong", path="rows.jsonl", line=3), 2),
        (ModelError("wrong"), 2),
        (AdapterError("wrong"), 2),
        (JobFailed("wrong", job="a"), 1),
    ],
)
def test_an_error_of_ours_is_one_message_on_standard_error(
    error: Exception,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its text as it is, no traceback, no markup, nothing on standard output."""
    monkeypatch.setattr("tlora.config.load_spec", raising(error))
    assert run("check", "jobs.yaml") == code
    captured = capsys.readouterr()
    assert captured.err == f"error: {error}\n" and captured.out == ""


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ours to mend, so it is not dressed up."""
    monkeypatch.setattr("tlora.config.load_spec", raising(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError):
        cli.main(["check", "jobs.yaml"])


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """As shells expect."""
    monkeypatch.setattr("tlora.config.load_spec", raising(KeyboardInterrupt()))
    assert run("check", "jobs.yaml") == 130
