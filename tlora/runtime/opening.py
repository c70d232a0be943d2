"""How a run begins or goes on, wherever it trains: its directory is taken before anything in it is
read, so that nothing joins the run unseen, and written once all is checked."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tlora.config import dump_spec
from tlora.core.errors import SpecError
from tlora.core.job import JobSpec, RunSpec
from tlora.data.prepare import PreparedData, Preparer
from tlora.runtime.data_lines import full_lines
from tlora.runtime.directory import RunDirectory, replace_text
from tlora.runtime.elastic.checking import newcomers_data
from tlora.runtime.elastic.desk import Desk
from tlora.runtime.elastic.roll import Again, submitted_names, with_submitted
from tlora.runtime.progress import Progress
from tlora.runtime.resuming import check_unchanged


@dataclass(frozen=True, slots=True)
class Opening:
    """Whoever has one closes its directory."""

    directory: RunDirectory
    spec: RunSpec
    """The jobs of the file, and after them those that were submitted to the run."""

    again: Again
    fresh: bool
    goes_on: bool
    """There is a run, and it is not started over."""

    absent: tuple[JobSpec, ...] = ()
    """Jobs of an earlier command that this one leaves out: they keep their settings on record."""

    submitted: tuple[str, ...] = ()

    @property
    def root(self) -> Path:
        return self.directory.root

    @property
    def recorded(self) -> RunSpec:
        return replace(self.spec, jobs=(*self.spec.jobs, *self.absent))

    def create(self) -> None:
        create(self.directory, fresh=self.fresh, goes_on=self.goes_on)

    def write(self, data: Mapping[str, PreparedData], about: dict[str, object]) -> None:
        """What the run is. `about` is for its run.json."""
        replace_text(self.root / "resolved.yaml", dump_spec(self.recorded))
        replace_text(self.root / "data.txt", "\n".join(full_lines(data)) + "\n")
        about |= {"submitted": list(self.submitted), **self.again.as_json()}
        self.directory.write_json(self.root / "run.json", about)

    def desk(
        self,
        running: Iterable[str],
        shape: PreTrainedModel,
        device: torch.device,
        progress: Progress,
        *,
        preparer: Preparer | None = None,
        in_turns: bool = False,
    ) -> Desk:
        """Where the run is asked for more; `running` are the jobs that it has to train. `preparer`:
        of the run's own data. `in_turns`: this thread has something else to do meanwhile."""
        return Desk(
            self.root,
            self.recorded,
            running,
            prepare=newcomers_data(self.spec, shape, device, preparer),
            say=progress.say,
            proven_ranks=proven_ranks(self.spec),
            in_turns=in_turns,
        )


def open_run(spec: RunSpec, directory: RunDirectory, *, fresh: bool, again: Again) -> Opening:
    """Raises SpecError if somebody else is at work there, or if this is not the same run. Then, and
    only then, the directory is closed."""
    try:
        directory.take_if_there()
        if fresh or not directory.is_run:
            return Opening(directory, spec, again, fresh, goes_on=False)
        if directory.is_sweep:
            raise SpecError(
                f"--output: {directory.root} holds a sweep, which tlora tune goes on with; name "
                "another directory, or add --fresh to start over"
            )
        spec = with_submitted(spec, directory.root)
        return Opening(
            directory,
            spec,
            again,
            fresh,
            goes_on=True,
            absent=check_unchanged(directory, spec),
            submitted=tuple(submitted_names(directory.root)),
        )
    except BaseException:
        directory.close()
        raise


def create(directory: RunDirectory, *, fresh: bool, goes_on: bool) -> None:
    """Raises SpecError if there is a run by now that is neither gone on with nor started over."""
    directory.create(fresh=fresh)
    if directory.is_run and not (goes_on or fresh):
        # It was not there to be taken before.
        raise SpecError(
            f"--output: another tlora has begun a run in {directory.root} meanwhile; give the same "
            "command again to go on with it, or name another directory"
        )


def proven_ranks(spec: RunSpec) -> frozenset[int] | None:
    """Those that exact isolation is shown for; None where bits do not count."""
    exact = spec.engine.isolation == "exact"
    return frozenset(job.lora.r for job in spec.jobs) if exact else None
