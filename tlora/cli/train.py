"""`tlora train`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tlora.cli.options import JobFile, Overrides, PolicyOption, ProfileOption
from tlora.cli.output import print_error
from tlora.core.errors import SpecError
from tlora.core.job import Isolation, RunSpec
from tlora.core.plan import Plan

if TYPE_CHECKING:
    from tlora.runtime.training import RunResult

AUTO = "auto"


def train(
    file: JobFile,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="DIR",
            help="Where adapters, metrics and checkpoints go.",
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
            help="Train on so many GPUs, or in so many processes where there are none; who trains "
            "where is scheduled.",
        ),
    ] = 1,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE|auto",
            help="Lay one copy of the jobs' base over several ranks as this file says: replicas, "
            "fsdp, bucket, adapters; auto: as is predicted to be the fastest on --devices. Under "
            "torchrun this process is one of the ranks.",
        ),
    ] = None,
    profile: ProfileOption = None,
    policy: PolicyOption = "tlora",
    isolation: Annotated[
        Isolation | None,
        typer.Option(
            "--isolation",
            help="exact: the same bits whoever shares the device.",
            show_default="what the file says",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over instead of resuming; asks first.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Train the jobs of a file together. The same command again resumes."""
    # The spec first: a typo should not wait for torch.
    from tlora.config import load_spec

    overrides = [*(override or ()), *([f"engine.isolation={isolation}"] if isolation else ())]
    spec = load_spec(file, overrides)
    folder = output or Path("runs") / file.stem
    if fresh and not yes:
        ask_to_start_over(folder)

    if plan is not None:
        result = train_with_plan(spec, folder, plan, devices=devices, profile=profile, fresh=fresh)
    elif devices == 1:
        from tlora.runtime.training import train as train_run

        result = train_run(spec, output=folder, fresh=fresh)
    else:
        from tlora.runtime.scheduled import train_on_devices

        result = train_on_devices(
            spec, output=folder, devices=devices, fresh=fresh, profile=profile, policy=policy
        )
    if result.interrupted:
        print_error("interrupted: the same command goes on from here")
        raise typer.Exit(130)
    if result.failed:
        print_error(f"failed: {', '.join(result.failed)}; the reasons are in {folder}")
        raise typer.Exit(1)


def train_with_plan(
    spec: RunSpec, folder: Path, file: Path, *, devices: int, profile: str | None, fresh: bool
) -> "RunResult":
    from tlora.config import load_plan
    from tlora.runtime.group.plans import check_plan
    from tlora.runtime.group.running import train_as_rank, train_in_group

    # torchrun's own variables: somebody else has started the ranks.
    started = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    ranks = int(os.environ["WORLD_SIZE"]) if started else devices
    if str(file) == AUTO:
        plan = fastest_plan(spec, ranks, profile)
    else:
        plan = load_plan(file)
        check_plan(plan, spec, world=None if ranks == 1 else ranks)
    if started:
        return train_as_rank(spec, output=folder, plan=plan, fresh=fresh)
    return train_in_group(spec, output=folder, plan=plan, fresh=fresh)


def fastest_plan(spec: RunSpec, ranks: int, profile: str | None) -> Plan:
    """Of all jobs as one group, by the cost model; the same on every rank."""
    from tlora.runtime.planning import plan_run

    choice = plan_run(spec, gpus=ranks, profile=profile).one_group
    if choice is None:
        raise SpecError("auto chooses for several devices; add --devices 2", field="--plan")
    if choice.best is None:
        raise SpecError(choice.sentence, field="--plan")
    typer.echo(choice.sentence)
    return choice.best.plan


def ask_to_start_over(folder: Path) -> None:
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    try:
        agreed = typer.confirm(f"Remove what {folder} holds and start over?", err=True)
    except typer.Abort:
        # Nobody there to answer; the question's line is still open.
        typer.echo(err=True)
        agreed = False
    if not agreed:
        raise SpecError(f"--fresh: nothing was removed from {folder}; answer y, or add --yes")
