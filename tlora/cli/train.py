"""`tlora train`."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tlora.cli.options import (
    ON_RECORD,
    JobFile,
    Overrides,
    PolicyOption,
    ProfileOption,
    command_again,
    named_directory,
    said,
)
from tlora.cli.output import print_error
from tlora.core.errors import SpecError
from tlora.core.job import Isolation, RunSpec
from tlora.core.plan import Plan
from tlora.runtime.directory import RunDirectory
from tlora.runtime.group.launched import SPOKEN_S, Started, failed_before, started_ranks

if TYPE_CHECKING:
    from tlora.runtime.elastic.roll import Again
    from tlora.runtime.training import RunResult

AUTO = "auto"
DEFAULT_POLICY = "tlora"


def train(
    context: typer.Context,
    file: JobFile,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="DIR",
            parser=named_directory,
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
            help="Train on so many GPUs, or in so many processes where there are none, by the plan "
            "that is predicted to be the fastest.",
        ),
    ] = 1,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE|auto",
            help="Train as one group over several ranks as this file says: replicas, fsdp, "
            "bucket, adapters; auto: as is predicted to be the fastest on --devices. Under "
            "torchrun this process is one of the ranks.",
        ),
    ] = None,
    profile: ProfileOption = None,
    policy: PolicyOption = DEFAULT_POLICY,
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
    from tlora.runtime.elastic.roll import TLORA, Again, with_submitted

    if plan is not None and policy != DEFAULT_POLICY:
        raise SpecError(
            "is for workers, and --plan trains one group: leave one of them out", field="--policy"
        )
    overrides = [*(override or ()), *([f"engine.isolation={isolation}"] if isolation else ())]
    spec = load_spec(file, overrides)
    folder = output or Path("runs") / file.stem
    started = started_ranks()
    if started is not None and started.attempt:
        # What the first attempt has trained is to be gone on with.
        fresh = False
    if fresh and not yes:
        ask_to_start_over(folder)
    if not fresh:
        # Plans are made for these, too.
        spec = with_submitted(spec, folder)
    if started is not None and started.attempt:
        _end_if_failed(failed_before(folder, [job.name for job in spec.jobs]), folder, started)

    again = Again(
        TLORA if started is None else started.launcher, tuple(said(context, but=ON_RECORD))
    )
    run = _Run(spec, folder, devices, fresh=fresh, profile=profile, started=started, again=again)
    if plan is not None:
        result = run.with_plan(plan)
    elif started is not None and started.ranks > 1:
        result = run.with_plan(Path(AUTO))
    elif devices == 1:
        from tlora.runtime.training import train as train_run

        _check_unused(policy, profile)
        result = train_run(spec, output=folder, fresh=fresh, again=again)
    else:
        result = run.over_devices(policy)
    if result.interrupted:
        # What torchrun was told is not known here.
        command = "the same command" if started is not None else command_again(context)
        if started is None or started.speaks:
            print_error(f"interrupted: go on from here with: {command}")
        raise typer.Exit(130)
    _end_if_failed(result.failed, folder, started)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run over several devices, in one of the ways there are."""

    spec: RunSpec
    folder: Path
    devices: int
    fresh: bool
    profile: str | None
    started: Started | None
    again: "Again"

    @property
    def before(self) -> Path | None:
        """Where an earlier run is gone on with."""
        return self.folder if not self.fresh and RunDirectory(self.folder).is_run else None

    def over_devices(self, policy: str) -> "RunResult":
        """As the planner says: a worker on each device, or one group. Policies are of workers: to
        name another one asks for these."""
        if policy == DEFAULT_POLICY:
            from tlora.runtime.group.choosing import way_over_devices

            way = way_over_devices(
                self.spec, self.devices, output=self.before, profile=self.profile
            )
            _say(way.sentence)
            if way.plan is not None:
                return self._in_group(way.plan)
        from tlora.runtime.scheduled import train_on_devices

        return train_on_devices(
            self.spec,
            output=self.folder,
            devices=self.devices,
            fresh=self.fresh,
            profile=self.profile,
            policy=policy,
            again=self.again,
        )

    def with_plan(self, file: Path) -> "RunResult":
        from tlora.runtime.group.choosing import check_memory, fastest_plan
        from tlora.runtime.group.plans import check_plan

        started = self.started
        ranks = started.ranks if started else self.devices
        about = {
            "output": self.before,
            "profile": self.profile,
            "per_node": started.per_node if started else None,
        }
        if str(file) == AUTO:
            if ranks == 1:
                raise SpecError("auto chooses for several devices; add --devices 2", field="--plan")
            way = fastest_plan(self.spec, ranks, use_all=started is not None, **about)
            assert way.plan is not None
            plan = way.plan
            if started is None or started.speaks:
                _say(way.sentence)
        else:
            from tlora.config import load_plan

            plan = load_plan(file)
            check_plan(plan, self.spec, world=None if ranks == 1 else ranks)
            check_memory(self.spec, plan, **about)
        if started is not None:
            return self._as_rank(plan, started)
        return self._in_group(plan)

    def _as_rank(self, plan: Plan, started: Started) -> "RunResult":
        from tlora.runtime.group.as_rank import RefusedByRank0, train_as_rank

        try:
            return train_as_rank(
                self.spec,
                output=self.folder,
                plan=plan,
                fresh=self.fresh,
                attempt=started.attempt,
                again=self.again,
            )
        except RefusedByRank0:
            time.sleep(SPOKEN_S)
            raise typer.Exit(2) from None

    def _in_group(self, plan: Plan) -> "RunResult":
        from tlora.runtime.group.running import train_in_group

        return train_in_group(
            self.spec,
            output=self.folder,
            plan=plan,
            fresh=self.fresh,
            profile=self.profile,
            again=self.again,
        )


def _end_if_failed(jobs: list[str], folder: Path, started: Started | None) -> None:
    """Every rank of a group ends alike: a launcher on another node would wait for one that does
    not."""
    if not jobs:
        return
    if started is None or started.speaks:
        print_error(f"failed: {', '.join(jobs)}; the reasons are in {folder}")
    else:
        # A launcher ends all ranks with the first that leaves: who speaks must come to it.
        time.sleep(SPOKEN_S)
    raise typer.Exit(1)


def _check_unused(policy: str, profile: str | None) -> None:
    """On one device nobody asks for them; a name that there is not is a mistake all the same."""
    from tlora.costs.profile import find_profile
    from tlora.runtime.planning import check_policy

    check_policy(policy)
    if profile is not None:
        find_profile(profile)


def _say(sentence: str) -> None:
    """Nothing where there is nothing left to plan."""
    if sentence:
        typer.echo(sentence)


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
