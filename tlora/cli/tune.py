"""`tlora tune`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tlora.cli.options import Overrides, ProfileOption, check_place, command_again, named_directory
from tlora.cli.output import print_error
from tlora.cli.train import ask_to_start_over
from tlora.core.errors import SpecError
from tlora.core.job import Isolation
from tlora.core.sweep import SweepSpec

if TYPE_CHECKING:
    from tlora.tuning.results import Study

SweepFile = Annotated[Path, typer.Argument(metavar="FILE", help="A sweep file, YAML or JSON.")]


def tune(
    context: typer.Context,
    file: SweepFile,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="DIR",
            parser=named_directory,
            help="Where trials, decisions and the winner go.",
            show_default="runs/<file stem>",
        ),
    ] = None,
    override: Overrides = None,
    devices: Annotated[
        int,
        typer.Option(
            "--devices",
            metavar="N",
            min=1,
            help="Train on so many GPUs, or in so many processes where there are none; which task "
            "gets which is planned, and said before it begins.",
        ),
    ] = 1,
    profile: ProfileOption = None,
    isolation: Annotated[
        Isolation | None,
        typer.Option(
            "--isolation",
            help="exact: the same bits whoever shares the device.",
            show_default="what the file says",
        ),
    ] = None,
    measure_fusion: Annotated[
        bool,
        typer.Option(
            "--measure-fusion",
            help="Afterwards, run some trials for seconds together and one at a time, so that the "
            "report tells what fusing saved.",
        ),
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="F", help="Write the study as one line of JSON, too."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over instead of resuming; asks first.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Try many settings of one job, or of several tasks, together, give up what loses, keep the
    best adapter. The same command again resumes."""
    check_place("--json", json_file)
    specs = read_specs(file, override, isolation)
    first, *others = specs
    scheduled = devices > 1 or bool(others)
    if measure_fusion and scheduled:
        raise SpecError(
            "is for one task on one device: leave it out here, or tune the tasks one by one",
            field="--measure-fusion",
        )
    folder = output or Path("runs") / file.stem
    if fresh and not yes:
        ask_to_start_over(folder)

    if scheduled:
        from tlora.runtime.sweeps.tasks import tune_on_devices

        found = tune_on_devices(specs, output=folder, devices=devices, fresh=fresh, profile=profile)
        told, studies = found.as_json(), found.studies
    else:
        from tlora.runtime.sweeps.tune import tune as run_sweep

        study = run_sweep(first, output=folder, fresh=fresh, measure_fusion=measure_fusion)
        told, studies = study.as_json(), {first.task.name: study}
    if json_file is not None:
        json_file.expanduser().write_text(json.dumps(told) + "\n", encoding="utf-8")
    leave(studies, folder, command_again(context))


def read_specs(
    file: Path, override: Sequence[str] | None, isolation: Isolation | None
) -> tuple[SweepSpec, ...]:
    """The file, and every trial's settings: a typo should not wait for torch."""
    from tlora.config import load_tasks
    from tlora.core.sweep import trial_of
    from tlora.tuning.samplers import is_known_before, planned

    overrides = [*(override or ()), *([f"engine.isolation={isolation}"] if isolation else ())]
    specs = load_tasks(file, overrides)
    for spec in specs:
        if is_known_before(spec.search):
            for number, params in enumerate(planned(spec.search)):
                trial_of(spec.task, f"{spec.task.name}-{number:02}", params)
    return specs


def leave(studies: Mapping[str, "Study"], folder: Path, again: str) -> None:
    """Says what is missing, with the exit code of it: 130 if a person stopped the sweep, 1 if a
    task has no winner."""
    if any(study.interrupted for study in studies.values()):
        print_error(f"interrupted: go on from here with: {again}")
        raise typer.Exit(130)
    without = [task for task, study in studies.items() if study.best is None]
    if without:
        of = f"of {', '.join(without)} " if len(studies) > 1 else ""
        where = folder / "study.json"
        print_error(f"no trial {of}came to a value; the reasons are in {where}")
        raise typer.Exit(1)
