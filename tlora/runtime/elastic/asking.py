"""What people ask of a run of `tlora train` from another process, through its store."""

import json
from dataclasses import replace
from pathlib import Path

from tlora.config import load_spec
from tlora.config.dumping import resolved
from tlora.core.errors import SpecError
from tlora.core.job import RunSpec
from tlora.runtime.asking import is_at_work, put_and_wait
from tlora.runtime.directory import RunDirectory
from tlora.runtime.elastic.roll import command_to_go_on, newcomers
from tlora.runtime.run_log import read_about, read_spec
from tlora.store.requests import Requests

WITHDRAWN = "withdrawn: nobody was at work"


def is_sweep(root: Path) -> bool:
    return (root / "study.json").exists()


def check_is_run(root: Path, verb: str) -> None:
    """Raises SpecError if `verb` is nothing that can be asked of what `root` holds."""
    if is_sweep(root):
        raise SpecError(f"{root} is a sweep, which makes its own trials; {verb} is for tlora train")
    read_about(root)


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
        if answer is None and _withdraw(requests, root, number):
            raise nobody_at_work(root)
    finally:
        requests.close()
    if answer is None:
        return ["noted: the run is busy, and takes them in between two nano-batches"]
    return [f"{root}: {answer}"]


def ask(root: Path, kind: str, job: str, *, patience_s: float) -> str:
    """Cancel a job, or have it go on. Raises SpecError for what cannot be done."""
    check_is_run(root, kind)
    check_job(root, job)
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


def nobody_at_work(root: Path) -> SpecError:
    return SpecError(
        f"nobody is at work in {root}; go on with it by {command_to_go_on(root)}, and submit then, "
        "or train these jobs in a run of their own"
    )


def _withdraw(requests: Requests, root: Path, number: int) -> bool:
    """The run has ended without a look at it. Under its lock, so that nobody takes it up
    meanwhile; False if somebody is at work again."""
    directory = RunDirectory(root)
    try:
        directory.take()
    except SpecError:
        return False
    try:
        requests.answer(number, WITHDRAWN)
    finally:
        directory.close()
    return True


def _check(spec: RunSpec) -> None:
    """As tlora check. It makes the tokens, too, so that the run finds them in the cache."""
    from tlora.model.loading import load_shape, resolve_device
    from tlora.runtime.elastic.checking import newcomers_data
    from tlora.runtime.environment import quieten_libraries

    quieten_libraries()
    device = resolve_device(spec.engine.device)
    newcomers_data(spec, load_shape(spec.base), device)(spec.jobs)
