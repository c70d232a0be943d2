"""Runs the blocks of a page in order, in one folder, as a reader would."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.command_server import HOLD_AFTER
from support.pages import Block, PageError, check_output
from tlora.config import load_plan, load_spec, load_sweep, load_tasks
from tlora.config.fields import JOB
from tlora.config.reading import parse_yaml
from tlora.config.values import is_tree
from tlora.core.errors import SpecError

SUPPORT = Path(__file__).parent
REPOSITORY = SUPPORT.parents[1]
COMMANDS = ("tlora", "python")


@dataclass(frozen=True)
class Shell:
    """bash with our commands first on the PATH."""

    environment: dict[str, str]
    seconds: float = 600
    """A block that takes longer hangs."""

    def run(self, script: str, folder: Path, interrupt_after: str | None = None) -> "Ran":
        """Both streams of the script in one text, and its exit code."""
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env={**self.environment, HOLD_AFTER: interrupt_after or ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_hear_ctrl_c,
        )
        timer = threading.Timer(self.seconds, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        ran = Ran()
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                ran.output += line
                if interrupt_after and not ran.interrupted and interrupt_after in line:
                    # To all in the foreground, as a terminal does.
                    os.killpg(process.pid, signal.SIGINT)
                    ran.interrupted = True
        ran.code = process.wait()
        timer.cancel()
        return ran


@dataclass
class Ran:
    output: str = ""
    code: int = 0
    interrupted: bool = field(default=False)


@contextmanager
def command_server(folder: Path) -> Iterator[Shell]:
    """A server of commands, and a shell that uses it; no network, a cache of its own."""
    environment = {
        **os.environ,
        "HOME": str(folder),
        "TLORA_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "100",
        "TLORA_COMMAND_SERVER": str(folder / "socket"),
        "PATH": f"{put_shims(folder / 'bin')}{os.pathsep}{os.environ['PATH']}",
    }
    for name in ("CI", "GITHUB_ACTIONS", "FORCE_COLOR"):
        environment.pop(name, None)
    server = subprocess.Popen(
        [sys.executable, str(SUPPORT / "command_server.py"), environment["TLORA_COMMAND_SERVER"]],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n", "the command server did not start"
        yield Shell(environment)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _hear_ctrl_c() -> None:
    """As in a terminal, even if whoever started the tests does not: what runs in a shell's
    background ignores it, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def put_shims(folder: Path) -> Path:
    folder.mkdir()
    code = (SUPPORT / "command_shim.py").read_text()
    for name in COMMANDS:
        shim = folder / name
        shim.write_text(f"#!{sys.executable} -IS\n{code}")
        shim.chmod(0o755)
    return folder


def run_page(blocks: Sequence[Block], folder: Path, shell: Shell) -> None:
    """Raises PageError at the first block that does not do what the page says."""
    output = ""
    for block in blocks:
        if block.not_run:
            output = ""
        elif block.language in ("bash", "python"):
            output = run_block(block, folder, shell)
        elif block.language == "yaml":
            load_block(block, folder)
        elif block.language == "text":
            check_output(block, output)


def run_block(block: Block, folder: Path, shell: Shell) -> str:
    script = block.text
    if block.language == "python":
        file = folder / (block.file_name or ".block.py")
        file.write_text(block.text)
        script = f"python {file.name}"
    ran = shell.run(script, folder, block.interrupt_after)
    if block.interrupt_after and not ran.interrupted:
        raise PageError(f"{block.place}: never said '{block.interrupt_after}':\n{ran.output}")
    if ran.code != block.exit_code:
        raise PageError(
            f"{block.place}: ended with {ran.code}, not {block.exit_code}:\n{script}\n{ran.output}"
        )
    return ran.output


def load_block(block: Block, folder: Path) -> None:
    """A job or sweep file, or some lines of one; the reader saves one that begins with its name. A
    plan file has a bucket."""
    tree = parse_yaml(block.text, block.place)
    if not is_tree(tree):
        raise PageError(f"{block.place}: not a mapping")
    load = load_spec
    if "bucket" in tree:
        load = load_plan
    elif "tasks" in tree:
        load = load_tasks
        space = {"space": {"lora.r": [4, 8]}}
        tree = {"base": "demo", "defaults": {"eval": {"split": 4}}, "search": space, **tree}
    elif "search" in tree:
        load = load_sweep
        tree = {
            "base": "demo",
            "task": {"name": "a", "data": "org/rows", "eval": {"split": 4}},
            **tree,
        }
    elif "jobs" not in tree:
        job = {key: value for key, value in tree.items() if key in JOB.sections[""]}
        rest = {key: value for key, value in tree.items() if key not in job}
        tree = {"base": "demo", **rest, "jobs": [{"name": "a", "data": "org/rows", **job}]}
    else:
        # One that is submitted names none.
        tree = {"base": "demo", **tree}
    before = Path.cwd()
    try:
        # A mapping's names are looked up where we stand.
        os.chdir(folder)
        load(tree)
    except SpecError as error:
        raise PageError(f"{block.place}: {error}") from error
    finally:
        os.chdir(before)
    if block.file_name:
        (folder / block.file_name).write_text(block.text)
