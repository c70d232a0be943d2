"""Who has a run directory: whoever took it, by what it left there, and the processes that keep it,
by what the system knows."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROCESSES = Path("/proc")


@dataclass(frozen=True, slots=True)
class Holder:
    """Who took a directory."""

    pid: int
    host: str
    command: str

    def __str__(self) -> str:
        workers = "workers that are left of " if self.is_gone else ""
        return f" ({workers}process {self.pid} on {self.host}: {self.command})"

    @property
    def is_gone(self) -> bool:
        """As far as can be seen from here."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False


@dataclass(frozen=True, slots=True)
class Keeper:
    """A process that has the lock of a directory, its own or that of whoever started it."""

    pid: int
    is_stopped: bool
    """By SIGSTOP or Ctrl-Z, say: it does nothing, and so it does not end."""


def keepers(root: Path) -> list[Keeper]:
    """As far as this user may look; none where the system does not tell."""
    about = root.stat()
    return [
        Keeper(int(process.name), _state(process) == "T")
        for process in PROCESSES.glob("[0-9]*")
        if any(os.path.samestat(about, each) for each in _locked(process))
    ]


def way_out(holder: Holder | None, keeping: Sequence[Keeper]) -> str:
    """What a person who is refused can do."""
    stopped = [each for each in keeping if each.is_stopped]
    left = keeping if holder is not None and holder.is_gone else []
    named = stopped or left
    if not named:
        return "wait for it, or name another directory"
    pids = " ".join(str(each.pid) for each in named)
    if len(named) == 1:
        have, are, them = f"process {pids} has", "is", "it"
    else:
        have, are, them = f"processes {pids} have", "are", "them"
    state = f"{are} stopped: kill -CONT {pids} lets {them} go on," if stopped else "should be gone:"
    return (
        f"{have} it and {state} kill -KILL {pids} ends {them}, and the jobs go on from their "
        "checkpoints; or name another directory"
    )


def _locked(process: Path) -> Iterator[os.stat_result]:
    """The files that it has locks of. Processes come and go, and most are none of ours."""
    try:
        handles = list((process / "fdinfo").iterdir())
    except OSError:
        return
    for handle in handles:
        with suppress(OSError):
            if "FLOCK" in handle.read_text():
                yield (process / "fd" / handle.name).stat()


def _state(process: Path) -> str:
    """A letter, behind the name in brackets."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
