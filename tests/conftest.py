"""Fixtures for all tests."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

# Before torch is imported, here and in every process a test starts: the models are so small that a
# second thread costs more than it brings, and many times more on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a shell starts in the background without job control ignores Ctrl-C, and so would every
# process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--figures", help="append what tests measure to this file, a line of JSON each"
    )


def pytest_configure(config: pytest.Config) -> None:
    """How long an example takes is the machine's matter and says nothing about what is tested. The
    examples are the same every time: a new one is for who looks for it to find, with
    `--hypothesis-profile search`, not for whoever has changed something else."""
    if config.pluginmanager.hasplugin("hypothesispytest"):
        # Not everywhere: tests/gpu run on machines with little installed.
        from hypothesis import HealthCheck, settings

        unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.register_profile("suite", unhurried, derandomize=True)
        settings.register_profile("search", unhurried, max_examples=1000)
        settings.load_profile(config.getoption("--hypothesis-profile") or "suite")


def seed_told() -> str:
    """Empty where inputs are those of every run; support/interpreter.py draws them."""
    seed = os.environ.get("TLORA_TEST_SEED")
    return f"random inputs: TLORA_TEST_SEED={seed}" if seed else ""


@pytest.fixture(autouse=True)
def failures_tell_their_inputs() -> None:
    """Beside what else a failing test has printed."""
    if told := seed_told():
        print(told)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if told := seed_told():
        terminalreporter.write_line(told)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with real models and datasets."""
    folder = os.environ.get("TLORA_TEST_DATA")
    if not folder:
        pytest.skip("TLORA_TEST_DATA is not set: it names the folder with real models and datasets")
    return Path(folder)


@pytest.fixture
def keep_line(pytestconfig: pytest.Config) -> Callable[[dict[str, object]], None]:
    """Where a test measures what is claimed, and `--figures` names a file."""

    def keep(line: dict[str, object]) -> None:
        if path := pytestconfig.getoption("--figures"):
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    return keep
