"""Whether somebody else has started the ranks, torchrun say. Imports nothing that takes long."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SPOKEN_S = 3.0
"""In which the rank that speaks for all has said why the group ends."""


@dataclass(frozen=True, slots=True)
class Started:
    """This process is a rank of a group that somebody has started, torchrun say."""

    rank: int
    ranks: int
    per_node: int
    attempt: int
    """Of the launcher: above 0 it has started the ranks again."""

    @property
    def speaks(self) -> bool:
        return self.rank == 0

    @property
    def launcher(self) -> tuple[str, ...]:
        """What comes before tlora's own words; where nodes meet is not known here."""
        nodes = self.ranks // self.per_node
        over = ("--nnodes", str(nodes), "...") if nodes > 1 else ()
        return ("torchrun", "--nproc-per-node", str(self.per_node), *over, "-m", "tlora")


def started_ranks() -> Started | None:
    """By torchrun's own variables; None for a process that stands for itself."""
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    ranks = int(os.environ["WORLD_SIZE"])
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return Started(int(os.environ["RANK"]), ranks, per_node, _attempt())


def _attempt() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def refused_before() -> bool:
    """Whether this launcher's first start came to nothing for a reason that is still the same. It
    starts ranks again whatever their exit code says."""
    note = _refusal_note()
    return _attempt() > 0 and note is not None and note.exists()


def note_refusal() -> bool:
    """Of this start; whether this rank is the first of its node, which is to say why. What was let
    in once may be let in again: of later attempts nothing is noted."""
    note = _refusal_note()
    if note is None or _attempt() > 0:
        return True
    try:
        note.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def _refusal_note() -> Path | None:
    """Beside the folders that torchrun makes for each of its attempts, and for nobody else."""
    folder = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    return folder.parent / "tlora-refused" if folder.name.startswith("attempt_") else None


def failed_before(root: Path, jobs: Iterable[str]) -> list[str]:
    """The jobs that did not get through in an earlier attempt, if all have come to an end and
    nothing is left to do. A launcher starts ranks again that say so by their exit code; it knows no
    code for not to."""
    status: dict[str, str] = {}
    for job in jobs:
        try:
            status[job] = json.loads((root / job / "result.json").read_text())["status"]
        except (OSError, ValueError, KeyError, TypeError):
            return []
    return [job for job, each in status.items() if each in ("failed", "paused")]
