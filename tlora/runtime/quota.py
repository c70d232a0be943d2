"""How many cores' time a container lets its processes have, by Linux's control groups.

Such a limit hides no core: whoever starts a thread for each core that there is has all of them
stopped for most of every tenth of a second.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def cpu_quota(groups: Path = GROUPS, own: Path = OWN) -> float | None:
    """In cores; None where nothing limits it, or nothing says so."""
    found = [_limit_of(folder) for folder in _folders(groups, _text(own))]
    return min((limit for limit in found if limit is not None), default=None)


def _folders(groups: Path, memberships: str) -> Iterator[Path]:
    """Of this process's groups and those that they are in, each of which may set a limit."""
    for line in memberships.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        inside = PurePosixPath(path.lstrip("/"))
        # Version 2 has one tree and names no controllers; in version 1 each has a tree of its own.
        trees = [groups]
        if controllers:
            names = (controllers, "cpu") if "cpu" in controllers.split(",") else ()
            trees = [groups / name for name in names]
        yield from (tree / each for tree in trees for each in (inside, *inside.parents))


def _limit_of(folder: Path) -> float | None:
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = (_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None  # "max", or not there.
    return cores if cores > 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
