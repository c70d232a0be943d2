"""What people ask of a run of `tlora train` from another process, through its store."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tlora.config import load_spec
from tlora.config.dumping import resolved
from tlora.core.errors import SpecError
from tlora.core.job import JobSpec, RunSpec
from tlora.runtime.asking import is_at_work, put_and_wait, read_answer
from tlora.runtime.directory import RunDirectory
from tlora.runtime.elastic.roll import command_to_go_on, newcomers
from tlora.runtime.elastic.standing import standings, state_of
from tlora.runtime.run_log import read_about, read_spec
from tlora.store.requests import Requests

WITHDRAWN = "withdrawn: nobody was at work"


Found = Literal["withdrawn", "kept", "held"]
"""Of a request without an answer. Kept: the run has put its jobs on record, or answered after all.
Held: somebody is at work."""


def is_sweep(root: Path) -> bool:
    return RunDirectory(root).is_sweep


def check_is_run(root: Path, verb: str) -> None:
    """Raises SpecError if `verb` is nothing that can be asked of what `root` holds."""
    if is_sweep(root):
        raise SpecError(f"{root} is a sweep, which makes its own trials; {verb} is for tlora train")
    read_about(root)


def base_of(root: Path) -> object:
    """As a file would name it. Raises SpecError where there is no run to join."""
    check_is_run(root, "submit")
    return read_spec(root / "resolved.yaml").get("base")


def submit(root: Path, asked: RunSpec, *, patience_s: float) -> list[str]:
    """Have the jobs join the run; lines that say what became of that. Raises SpecError, with
    nothing asked, where they cannot."""
    check_is_run(root, "submit")
    run = load_spec(root / "resolved.yaml")
    new = newcomers(run, asked, root=root)
    if not is_at_work(root):
        raise nobody_at_work(root)
    if new:
        _check(replace(asked, base=run.base, engine=run.engine, jobs=new))
    requests = Requests(root / "state.sqlite")
    try:
        body = json.loads(json.dumps(resolved(asked)))
        number, answer = put_and_wait(requests, root, "submit", "", body, patience_s=patience_s)
        found = _withdraw(requests, root, number, new) if answer is None else "held"
        if found == "withdrawn":
            raise nobody_at_work(root)
        answer = read_answer(requests, number)
    finally:
        requests.close()
    if answer is None and found == "kept":
        command = command_to_go_on(root)
        return [f"noted: the run ended as it took them in, and has them when it goes on: {command}"]
    if answer is None:
        return ["noted: the run is busy, and takes them in between two nano-batches"]
    return [f"{root}: {answer}"]


def ask(root: Path, kind: str, job: str, *, patience_s: float) -> str:
    """Cancel a job, or have it go on. Raises SpecError for what cannot be done."""
    check_is_run(root, kind)
    check_job(root, job)
    if not is_at_work(root):
        # A run that is at work knows better: its jobs may be about to end, or to begin again.
        check_not_over(root, job, kind)
    requests = Requests(root / "state.sqlite")
    try:
        answer = put_and_wait(requests, root, kind, job, {}, patience_s=patience_s).answer
    finally:
        requests.close()
    if answer is not None:
        return answer
    if not is_at_work(root):
        command = command_to_go_on(root)
        return f"noted: nobody is at work, and it is done when the run goes on: {command}"
    return "noted: the run is busy, and does it between two nano-batches"


def check_job(root: Path, job: str) -> None:
    names = [str(each["name"]) for each in read_spec(root / "resolved.yaml").get("jobs", [])]
    if job not in names:
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        raise SpecError(f"{root} has no job '{job}'; there are {shown}")


def check_not_over(root: Path, job: str, kind: str) -> None:
    """By its result: one that has come to its end cannot go on, or be cancelled."""
    try:
        status = json.loads((root / job / "result.json").read_text()).get("status")
    except (OSError, ValueError, AttributeError):
        return
    if status in ("completed", "stopped_early") or (kind, status) == ("cancel", "cancelled"):
        raise SpecError(f"{job} is over: {status}")


def nobody_at_work(root: Path) -> SpecError:
    if state_of(standings(root, at_work=False), at_work=False) == "over":
        return SpecError(
            f"nobody is at work in {root}, and its jobs are over; train these with tlora train and "
            f"--output {root} to have them there too, or in a run of their own"
        )
    return SpecError(
        f"nobody is at work in {root}; go on with it by {command_to_go_on(root)}, and submit then, "
        "or train these jobs in a run of their own"
    )


def _withdraw(requests: Requests, root: Path, number: int, new: tuple[JobSpec, ...]) -> Found:
    """If the run has ended without a look at it. Under its lock, so that nobody takes it up
    meanwhile."""
    directory = RunDirectory(root)
    try:
        directory.take(named=False)
    except SpecError:
        return "held"
    try:
        known = {job.name for job in load_spec(root / "resolved.yaml").jobs}
        if any(job.name in known for job in new):
            return "kept"
        return "withdrawn" if requests.answer(number, WITHDRAWN) else "kept"
    finally:
        directory.close()


def _check(spec: RunSpec) -> None:
    """As tlora check. It makes the tokens, too, so that the run finds them in the cache."""
    from tlora.model.loading import load_shape, resolve_device
    from tlora.runtime.elastic.checking import newcomers_data
    from tlora.runtime.environment import quieten_libraries

    quieten_libraries()
    device = resolve_device(spec.engine.device)
    newcomers_data(spec, load_shape(spec.base), device)(spec.jobs)
