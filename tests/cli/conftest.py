"""A job file, and runtime modules that record what they were asked."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tlora.cli.main import main
from tlora.runtime.elastic.roll import Again


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`jobs.yaml` with two jobs, in the current directory."""
    monkeypatch.chdir(tmp_path)
    file = Path("jobs.yaml")
    file.write_text(
        "base: org/model\ndefaults: {data: org/rows}\n"
        "jobs: [{name: a, max_steps: 7}, {name: b, lora: {r: 4, target_modules: [q_proj, v_proj]}}]"
    )
    return file


class FakeRuntime:
    """Stands in for the modules of `tlora.runtime` that verbs call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failed: list[str] = []
        self.interrupted = False
        self.again: Again | None = None
        functions = {
            "checking": ("check_run", self.check_run),
            "training": ("train", self.train),
            "scheduled": ("train_on_devices", self.train_on_devices),
            "verifying": ("verify_adapter", self.verify_adapter),
        }
        for module, (name, function) in functions.items():
            fake = ModuleType(f"tlora.runtime.{module}")
            setattr(fake, name, function)
            monkeypatch.setitem(sys.modules, fake.__name__, fake)

    def check_run(self, spec: object) -> list[str]:
        self.calls.append((spec,))
        return ["job 'a': 10 rows [chat]", "all well"]

    def train(self, spec: object, *, output: Path, fresh: bool, again: Again) -> SimpleNamespace:
        self.calls.append((spec, output, fresh))
        self.again = again
        return SimpleNamespace(failed=self.failed, interrupted=self.interrupted)

    def train_on_devices(self, spec: object, *, again: Again, **options: object) -> SimpleNamespace:
        self.calls.append((spec, options))
        self.again = again
        return SimpleNamespace(failed=self.failed, interrupted=self.interrupted)

    def verify_adapter(self, path: Path, base: str | None) -> list[str]:
        self.calls.append((path, base))
        return ["keys match", "logits match"]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    return FakeRuntime(monkeypatch)


@pytest.fixture
def tlora_command():
    """Runs a command line in this process and gives its exit code."""

    def run(*args: str) -> int:
        with pytest.raises(SystemExit) as caught:
            main(args)
        return int(caught.value.code or 0)

    return run
