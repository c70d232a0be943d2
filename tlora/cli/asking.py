"""`tlora submit`, `status`, `cancel`, `resume`, `clone`: a run or a sweep that is at work, asked
from another terminal."""

from pathlib import Path
from typing import Annotated

import typer

from tlora.cli.options import JobFile, Overrides
from tlora.cli.output import print_lines, print_table
from tlora.core.errors import SpecError

PATIENCE_S = 30.0

Trial = Annotated[str, typer.Argument(metavar="TRIAL", help="A trial of the sweep.")]
Job = Annotated[
    str, typer.Argument(metavar="JOB", help="A job of the run, or a trial of the sweep.")
]
RunOption = Annotated[
    Path, typer.Option("--run", metavar="DIR", help="Of the run: --output of train or tune.")
]


def submit(
    file: JobFile,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            metavar="DIR",
            help="The run that the jobs join: train's --output.",
            show_default="runs/<file stem>",
        ),
    ] = None,
    override: Overrides = None,
) -> None:
    """Have the jobs of a file join a run that is at work. Jobs that it has already stay as they
    are, and a file that names no base means that of the run."""
    # The spec first: a typo should not wait for torch.
    from tlora.config import load_spec
    from tlora.runtime.elastic.asking import base_of
    from tlora.runtime.elastic.asking import submit as submit_to

    root = run or Path("runs") / file.stem
    asked = load_spec(file, override or (), base=base_of(root))
    print_lines(submit_to(root, asked, patience_s=PATIENCE_S))


def status(run: RunOption) -> None:
    """How the jobs of a run stand, or the trials of a sweep, best first."""
    from tlora.runtime.elastic.asking import is_sweep

    if is_sweep(run):
        _sweep_status(run)
    else:
        _run_status(run)


def _run_status(run: Path) -> None:
    from tlora.runtime.asking import is_at_work
    from tlora.runtime.elastic.roll import command_to_go_on
    from tlora.runtime.elastic.standing import standings, state_of
    from tlora.runtime.run_log import read_about

    read_about(run)
    at_work = is_at_work(run)
    found = standings(run, at_work=at_work)
    print_table(
        ("job", "status", "step", "loss", "tokens/s"),
        [
            [
                each.job,
                each.status,
                f"{each.step}/{each.total_steps or '-'}",
                "-" if each.loss is None else f"{each.loss:.4f}",
                "-" if each.tokens_per_s is None else f"{each.tokens_per_s:,.0f}",
            ]
            for each in found
        ],
    )
    state = state_of(found, at_work=at_work)
    stopped = f"; go on with {command_to_go_on(run)}" if state == "stopped" else ""
    print_lines([f"{state}{stopped}"])


def _sweep_status(run: Path) -> None:
    from tlora.runtime.asking import is_at_work
    from tlora.runtime.sweeps.asking import read_study

    study = read_study(run)
    sign = 1 if study["objective"]["mode"] == "min" else -1
    trials = sorted(
        study["trials"],
        key=lambda each: (each["value"] is None, sign * (each["value"] or 0.0)),
    )
    metric = study["objective"]["metric"]
    print_table(
        ("trial", "status", "steps", metric, "settings"),
        [
            [
                each["name"],
                each["rule"] or each["status"],
                f"{each['step']}/{each['total_steps']}",
                "-" if each["value"] is None else f"{each['value']:.4f}",
                ", ".join(f"{name}={value}" for name, value in each["params"].items()),
            ]
            for each in trials
        ],
    )
    state = "over" if study["over"] else "running" if is_at_work(run) else "stopped"
    spent, full = study["tokens_spent"], study["tokens_full"]
    print_lines([f"{state}: {spent:,} tokens trained of {full:,}"])


def cancel(job: Job, run: RunOption) -> None:
    """Give a job or a trial up; its adapter, or its best one, is kept."""
    _ask(run, "stop" if _is_sweep(run) else "cancel", job)


def resume(job: Job, run: RunOption) -> None:
    """Let a job or a trial that was given up go on to its end."""
    _ask(run, "resume", job)


def clone(
    trial: Trial,
    run: RunOption,
    override: Annotated[
        list[str],
        typer.Option("--override", "-o", metavar="K=V", help="What is different: train.lr=1e-3."),
    ],
) -> None:
    """Train a copy of a trial with some settings changed, from its start."""
    from tlora.config.reading import plain
    from tlora.config.sweeps import read_changes

    if not _is_sweep(run):
        raise SpecError(
            f"{run} is not a sweep: put the job with its changes into a file under another name, "
            f"and give it to tlora submit FILE --run {run}"
        )
    changes = plain(read_changes(override))
    assert isinstance(changes, dict)
    _ask(run, "clone", trial, changes)


def _is_sweep(run: Path) -> bool:
    from tlora.runtime.elastic.asking import is_sweep
    from tlora.runtime.run_log import read_about

    if not is_sweep(run):
        read_about(run)
        return False
    return True


def _ask(run: Path, kind: str, job: str, body: dict[str, object] | None = None) -> None:
    if _is_sweep(run):
        from tlora.runtime.sweeps.asking import ask as ask_sweep

        said = ask_sweep(run, kind, job, body or {}, patience_s=PATIENCE_S)
    else:
        from tlora.runtime.elastic.asking import ask as ask_run

        said = ask_run(run, kind, job, patience_s=PATIENCE_S)
    print_lines([f"{job}: {said}"])
