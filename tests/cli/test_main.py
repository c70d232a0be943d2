"""The command as the shell sees it: speed, exit codes, one message per error."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import typer

import tlora
from tlora.cli import main as cli
from tlora.cli.app import app
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


RUNNER = Path(__file__).parents[1] / "support" / "interrupted_runner.py"
IMPORTED = [
    "tlora.cli.app",
    "typer",
    "rich.console",
    "tlora.core.job",
    "tlora.cli.tune",
    "tlora.config",
    "pydantic",
    "transformers",
    "torch",
]
"""By `tlora check`, in about this order."""


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    code = caught.value.code
    return code if isinstance(code, int) else 0


def raising(error: BaseException):
    def load(source: object, overrides: object) -> None:
        raise error

    return load


def processor_seconds(command: list[str]) -> tuple[float, str]:
    """Which a busy machine does not stretch as it does the clock's; of this process alone, whoever
    else ends meanwhile. And what it said."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime, said


@pytest.mark.parametrize("args", [["--help"], *([verb, "--help"] for verb in VERBS)])
def test_help_answers_at_once_and_without_torch(args: list[str]) -> None:
    """Well under a second of work; torch alone would take several. The first time Python may have
    files to compile, and caches that others fill cost every time something."""
    for _ in range(3):
        seconds, said = processor_seconds([sys.executable, "-c", PROBE, *args])
        assert "Usage: tlora" in said
        if seconds < BUDGET_SECONDS:
            return
    pytest.fail(f"{seconds:.1f} s")


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


def test_options_that_take_a_list_may_be_repeated() -> None:
    """Of one that may not, the last would be taken without a word of the others."""
    lists = [
        (verb, option)
        for verb, command in typer.main.get_command(app).commands.items()  # pyright: ignore
        for option in command.params
        if "," in (option.metavar or "")
    ]
    assert {(verb, option.name) for verb, option in lists} == {
        ("simulate", "policy"),
        *(("bench", name) for name in ("ranks", "batch", "arms")),
    }
    assert all(option.multiple for _, option in lists)


@pytest.mark.parametrize("module", IMPORTED)
def test_an_interrupt_while_python_imports_is_quiet(module: str, job_file: Path) -> None:
    """Whatever it comes to: of the command itself, or of what a verb needs."""
    command = [sys.executable, str(RUNNER), module, "check", str(job_file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_an_interrupt_that_python_wraps_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """As version 3.11 does while a class is made; another RuntimeError keeps its traceback."""

    class Pressed:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    def load(source: object, overrides: object) -> None:
        type("Late", (), {"member": Pressed()})

    monkeypatch.setattr("tlora.config.load_spec", load)
    assert run("check", "jobs.yaml") == 130
    monkeypatch.setattr("tlora.config.load_spec", raising(RuntimeError("ours")))
    with pytest.raises(RuntimeError, match="ours"):
        cli.main(["check", "jobs.yaml"])


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_loading_leaves_interrupts_as_they_were(handler) -> None:
    """Also for those who ignore them; in a thread, which may not change them, it loads as well."""
    seen: list[object] = []

    before = signal.signal(signal.SIGINT, handler)
    try:
        loader = threading.Thread(target=lambda: seen.append(cli.load_app()))
        loader.start()
        loader.join()
        assert seen == [cli.load_app()]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
