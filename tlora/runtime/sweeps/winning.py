"""The winner of a sweep: its adapter, the settings that made it, and how to train it alone."""

import json
import shlex
from pathlib import Path

from tlora.config import dump_spec
from tlora.core.errors import AdapterError
from tlora.core.sweep import SweepSpec
from tlora.model.peft_format import read_adapter
from tlora.model.super_model import SuperModel
from tlora.runtime.directory import replace_text
from tlora.runtime.exporting import (
    LOGITS_TOLERANCE,
    adapter_logits,
    copy,
    logits_error,
    plain_logits,
)
from tlora.runtime.sweeps.trials import MadeTrial
from tlora.tuning.results import Study, TrialResult, Winner


def keep_winner(
    spec: SweepSpec,
    study: Study,
    made: dict[str, MadeTrial],
    model: SuperModel,
    folder: Path | None = None,
) -> Winner | None:
    """`DIR/winner`, or another folder: adapter/, job.yaml, which trains the trial alone to its own
    end, and settings.json. None if no trial came to a value. Raises AdapterError if the adapter on
    disk gives other logits through the kernels than the plain way."""
    best = study.best
    if best is None:
        return None
    source = adapter_of(study.output / best.name, kept_best=spec.search.objective.keeps_best)
    if source is None:
        return None
    check_logits(source, made[best.name], model)
    folder = folder or study.output / "winner"
    folder.mkdir(parents=True, exist_ok=True)
    copy(source, folder / "adapter")
    job_file = folder / "job.yaml"
    replace_text(job_file, dump_spec(spec.run((made[best.name].job,))))
    command = shlex.join(["tlora", "train", str(job_file), "--output", str(folder / "alone")])
    settings = {
        "v": 1,
        "trial": best.name,
        "params": best.params,
        "metric": study.metric,
        "value": best.value,
        "step": step_of(source, best),
        "adapter_from": str(source.relative_to(study.output)),
        "command": command,
    }
    replace_text(folder / "settings.json", json.dumps(settings, indent=2) + "\n")
    return Winner(adapter=str(folder / "adapter"), job_file=str(job_file), command=command)


def step_of(adapter: Path, trial: TrialResult) -> int:
    """After which the adapter was taken: the best one may be older than the trial's end."""
    if adapter.name != "best":
        return trial.step
    return int(json.loads((adapter.parent / "result.json").read_text())["best_step"])


def check_logits(adapter: Path, trial: MadeTrial, model: SuperModel) -> None:
    """As is done for every adapter where there is one for each job."""
    found, probe = read_adapter(adapter, model.targets), trial.data.train[0].sequences[0]
    error = logits_error(
        plain_logits(model, found.weights, found.scale, probe),
        adapter_logits(model, found.weights, found.scale, probe),
    )
    if not error <= LOGITS_TOLERANCE:
        raise AdapterError(
            f"{adapter}: its matrices give other logits than the trained adapter (by {error:.1e} "
            f"of the largest; {LOGITS_TOLERANCE:.0e} may be rounding)"
        )


def adapter_of(folder: Path, *, kept_best: bool) -> Path | None:
    """The best adapter where that is what the trial is worth, else its last."""
    for name in ("best", "adapter") if kept_best else ("adapter", "best"):
        if (folder / name).is_dir():
            return folder / name
    return None
