"""Trackers besides the run directory: TensorBoard, Weights & Biases and MLflow, one run per job.

A tracker is somebody else's software, often across a network: if it breaks, it is left out from
there on, and the jobs go on. The libraries are optional and heavy, so they are imported when a file
asks for them.
"""

import importlib.util
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tlora.core.errors import SpecError
from tlora.core.job import Tracker
from tlora.runtime.directory import replace_text
from tlora.runtime.environment import mlflow_uri, wandb_project

if TYPE_CHECKING:
    from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]
    from torch.utils.tensorboard import SummaryWriter

Settings = Mapping[str, object]
"""Dotted names of a job's fields, and their values."""


class Sink(Protocol):
    """Raises whatever its library raises."""

    def open(self, job: str, settings: Settings, *, step: int) -> None:
        """A run for this job, from `step` on: what an earlier one logged beyond it is void."""
        ...

    def log(self, job: str, step: int, values: Mapping[str, float]) -> None: ...

    def close(self, job: str, status: str) -> None: ...


class TensorBoardSink:
    """Event files in the jobs' directories: `tensorboard --logdir DIR`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._writers: dict[str, SummaryWriter] = {}

    def open(self, job: str, settings: Settings, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(self.root / job), purge_step=step + 1)
        lines = [f"    {name}: {value}" for name, value in settings.items()]
        writer.add_text("settings", "\n".join(lines))
        self._writers[job] = writer

    def log(self, job: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writers[job].add_scalar(name, value, step)

    def close(self, job: str, status: str) -> None:
        writer = self._writers.pop(job)
        writer.add_text("status", status)
        writer.close()


class WandbSink:
    """Runs of one group, named like the jobs. WANDB_MODE, WANDB_PROJECT and the rest of its
    variables hold."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._runs: dict[str, object] = {}

    def open(self, job: str, settings: Settings, *, step: int) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        run = wandb.init(
            project=wandb_project(),
            group=self.root.name,
            name=job,
            id=remembered(self.root / job, "wandb"),
            resume="allow",
            config=dict(settings),
            dir=str(self.root / job),
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        remember(self.root / job, "wandb", run.id)
        self._runs[job] = run

    def log(self, job: str, step: int, values: Mapping[str, float]) -> None:
        self._runs[job].log(dict(values), step=step)  # pyright: ignore[reportAttributeAccessIssue]

    def close(self, job: str, status: str) -> None:
        run = self._runs.pop(job)
        run.summary["status"] = status  # pyright: ignore[reportAttributeAccessIssue]
        run.finish(exit_code=int(status == "failed"))  # pyright: ignore[reportAttributeAccessIssue]


class MlflowSink:
    """Runs of one experiment, named like the jobs, in DIR/mlflow.db unless MLFLOW_TRACKING_URI says
    otherwise. Its plain files are refused by newer versions. Values are sent together every few
    seconds: one by one they would cost milliseconds each."""

    EVERY_SECONDS = 2.0
    MOST = 1000
    """Values in one request, as MLflow allows."""

    ENDS: Mapping[str, str] = {
        "completed": "FINISHED",
        "stopped_early": "FINISHED",
        "cancelled": "KILLED",
        "failed": "FAILED",
    }

    def __init__(self, root: Path) -> None:
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self.root = root.resolve()
        self._client = MlflowClient(mlflow_uri() or f"sqlite:///{self.root / 'mlflow.db'}")
        self._runs: dict[str, str] = {}
        self._waiting: dict[str, list[Metric]] = {}
        self._sent = time.monotonic()

    def open(self, job: str, settings: Settings, *, step: int) -> None:
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        run = remembered(self.root / job, "mlflow")
        if run is None:
            run = self._client.create_run(self._experiment(), run_name=job).info.run_id
            remember(self.root / job, "mlflow", run)
            params = [Param(name, str(value)) for name, value in settings.items()]
            self._client.log_batch(run, params=params)
        else:
            self._client.update_run(run, status="RUNNING")
        self._runs[job] = run

    def log(self, job: str, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        waiting = self._waiting.setdefault(job, [])
        waiting += [Metric(name, value, now, step) for name, value in values.items()]
        if time.monotonic() - self._sent > self.EVERY_SECONDS:
            self._send()

    def _send(self) -> None:
        for job, metrics in self._waiting.items():
            for at in range(0, len(metrics), self.MOST):
                self._client.log_batch(self._runs[job], metrics=metrics[at : at + self.MOST])
        self._waiting.clear()
        self._sent = time.monotonic()

    def close(self, job: str, status: str) -> None:
        self._send()
        run = self._runs.pop(job)
        self._client.set_tag(run, "status", status)
        self._client.set_terminated(run, self.ENDS.get(status, "KILLED"))

    def _experiment(self) -> str:
        name = self.root.name
        if found := self._client.get_experiment_by_name(name):
            return found.experiment_id
        place = None if mlflow_uri() else (self.root / "mlruns").as_uri()
        return self._client.create_experiment(name, artifact_location=place)


SINKS: Mapping[Tracker, Callable[[Path], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
}


class Sinks:
    """All trackers of a run; what breaks one of them is said once."""

    def __init__(self, trackers: Iterable[Tracker], root: Path, say: Callable[[str], None]) -> None:
        self._say = say
        self._jobs: list[str] = []
        self._sinks: dict[Tracker, Sink] = {}
        for tracker in trackers:
            try:
                self._sinks[tracker] = SINKS[tracker](root)
            except Exception as error:
                self._leave_out(tracker, error)

    def open(self, job: str, settings: Settings, *, step: int) -> None:
        self._jobs.append(job)
        self._each(lambda sink: sink.open(job, settings, step=step))

    def log(self, job: str, step: int, kind: str, values: Mapping[str, object]) -> None:
        """Numbers are named `train/loss` and the like; anything else is left out."""
        numbers = {
            f"{kind}/{name}": float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        self._each(lambda sink: sink.log(job, step, numbers))

    def close(self, job: str, status: str) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
            self._each(lambda sink: sink.close(job, status))

    def close_all(self) -> None:
        for job in list(self._jobs):
            self.close(job, "interrupted")

    def _each(self, act: Callable[[Sink], None]) -> None:
        for tracker, sink in list(self._sinks.items()):
            try:
                act(sink)
            except Exception as error:
                del self._sinks[tracker]
                self._leave_out(tracker, error)

    def _leave_out(self, tracker: Tracker, error: Exception) -> None:
        what = f"{type(error).__name__}: {error}"
        self._say(f"report_to: {tracker} gave up and is left out from here on ({what})")


def check_trackers(trackers: Iterable[Tracker]) -> None:
    """Raises SpecError for the first that is not installed; imports nothing."""
    for tracker in trackers:
        if importlib.util.find_spec(tracker) is None:
            raise SpecError(
                f"{tracker} is not installed; pip install 'tlora[track]', or leave it out",
                field="report_to",
            )


def remembered(folder: Path, tracker: Tracker) -> str | None:
    """The tracker's own id of this job's run, if there was one before."""
    path = folder / "trackers.json"
    return json.loads(path.read_text()).get(tracker) if path.exists() else None


def remember(folder: Path, tracker: Tracker, run: str) -> None:
    path = folder / "trackers.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    replace_text(path, json.dumps({**known, tracker: run}) + "\n")
