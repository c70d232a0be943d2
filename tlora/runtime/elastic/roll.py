"""Which jobs a run has: those of its file, and those that were submitted to it since.

`resolved.yaml` has the settings of all; `run.json` says which of them came later, so that the same
command with the same file goes on with them too. Decisions are pure; files are read and written at
the end of the page. No torch.
"""

import json
import shlex
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tlora.config import changed_fields, dump_spec, load_spec
from tlora.core.errors import SpecError
from tlora.core.job import BaseSpec, JobSpec, RunSpec
from tlora.runtime.directory import replace_text

TLORA = ("tlora",)


@dataclass(frozen=True, slots=True)
class Again:
    """What a run was started with beyond its resolved.yaml, which has its jobs and its engine: what
    the command that goes on with it says again."""

    launcher: tuple[str, ...] = TLORA
    options: tuple[str, ...] = ()
    """Of tlora train."""

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def newcomers(run: RunSpec, asked: RunSpec, *, root: Path) -> tuple[JobSpec, ...]:
    """Jobs that are asked for and that the run does not have. Raises SpecError, naming job and
    field, where they cannot be of this run."""
    check_base(run.base, asked.base, root)
    if asked.engine.isolation == "exact" and run.engine.isolation != "exact":
        raise SpecError(
            f"the jobs ask for the same bits in any company, and {root} was started without; give "
            "them a run of their own, or leave it out",
            field="engine.isolation",
        )
    before = {job.name: job for job in run.jobs}
    for job in asked.jobs:
        changed = changed_fields(before[job.name], job) if job.name in before else []
        if changed:
            raise SpecError(
                f"differs from the job of this name that {root} has; give the new one another name",
                job=job.name,
                field=changed[0],
            )
    return tuple(job for job in asked.jobs if job.name not in before)


def check_base(run: BaseSpec, asked: BaseSpec, root: Path) -> None:
    for field in ("model", "revision", "dtype", "quantization"):
        ours, theirs = getattr(run, field), getattr(asked, field)
        if ours != theirs:
            raise SpecError(
                f"is {theirs}, and {root} trains on {ours}; all jobs of a run have one base, so "
                "train these in a run of their own",
                field=f"base.{field}",
            )


def check_proven(jobs: Sequence[JobSpec], ranks: Collection[int]) -> None:
    """Under exact isolation a rank that was not looked at before the run may have other bits."""
    for job in jobs:
        if job.lora.r not in ranks:
            shown = ", ".join(map(str, sorted(ranks)))
            raise SpecError(
                f"is {job.lora.r}; exact isolation was shown for {shown} when the run began, and "
                "can be shown only while no job trains: take one of these, or stop the run (Ctrl-C "
                "saves it) and give its command again with this job in the file",
                job=job.name,
                field="lora.r",
            )


def with_submitted(spec: RunSpec, root: Path) -> RunSpec:
    """The jobs of a file, and after them those that were submitted to the run in `root`."""
    named = {job.name for job in spec.jobs}
    names = [name for name in submitted_names(root) if name not in named]
    if not names:
        return spec
    try:
        known = {job.name: job for job in load_spec(root / "resolved.yaml").jobs}
    except SpecError:
        # Whoever goes on with the run says what is wrong with it.
        return spec
    return replace(spec, jobs=(*spec.jobs, *(known[name] for name in names if name in known)))


def submitted_names(root: Path) -> list[str]:
    return [str(name) for name in read_about(root).get("submitted", [])]


def enrol(root: Path, run: RunSpec, jobs: Sequence[JobSpec]) -> RunSpec:
    """Keep the jobs as if they had been in the file; what the run then has. Their settings are on
    disk before anything names them."""
    known = {job.name for job in run.jobs}
    whole = replace(run, jobs=(*run.jobs, *(job for job in jobs if job.name not in known)))
    replace_text(root / "resolved.yaml", dump_spec(whole))
    about = read_about(root)
    here = about.get("jobs", [])
    names = [job.name for job in jobs if job.name not in here]
    about["jobs"] = [*here, *names]
    about["submitted"] = list(dict.fromkeys([*about.get("submitted", []), *names]))
    replace_text(root / "run.json", json.dumps(about, indent=2) + "\n")
    return whole


def read_about(root: Path) -> dict[str, Any]:
    """run.json; empty where there is none that can be read."""
    try:
        found = json.loads((root / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def command_to_go_on(root: Path) -> str:
    """One that goes on with the run as it was: its resolved.yaml is a job file."""
    about = read_about(root)
    again = Again(tuple(about.get("launcher", TLORA)), tuple(about.get("options", ())))
    words = ["train", str(root / "resolved.yaml"), "--output", str(root)]
    return shlex.join([*again.launcher, *words, *again.options])
