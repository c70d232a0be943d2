"""`tlora status`, `cancel`, `resume`, `clone`: a sweep that runs, asked from another terminal."""

from pathlib import Path
from typing import Annotated

import typer

from tlora.cli.output import print_lines, print_table

PATIENCE_S = 30.0

Trial = Annotated[str, typer.Argument(metavar="TRIAL", help="A trial of the sweep.")]
RunOption = Annotated[
    Path, typer.Option("--run", metavar="DIR", help="The sweep's directory: tune's --output.")
]


def status(run: RunOption) -> None:
    """How the trials of a sweep stand, best first."""
    from tlora.runtime.sweeps.asking import is_at_work, read_study

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


def cancel(trial: Trial, run: RunOption) -> None:
    """Give a trial up; its best adapter is kept."""
    _ask(run, "stop", trial, {})


def resume(trial: Trial, run: RunOption) -> None:
    """Let a trial that was given up go on to its end."""
    _ask(run, "resume", trial, {})


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

    changes = plain(read_changes(override))
    assert isinstance(changes, dict)
    _ask(run, "clone", trial, changes)


def _ask(run: Path, kind: str, trial: str, body: dict[str, object]) -> None:
    from tlora.runtime.sweeps.asking import ask

    print_lines([f"{trial}: {ask(run, kind, trial, body, patience_s=PATIENCE_S)}"])
