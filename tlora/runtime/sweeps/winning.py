"""The winner of a sweep: its adapter, the settings that made it, and how to train it alone."""

import json
import shlex
from pathlib import Path

from tlora.config import dump_spec
from tlora.core.sweep import SweepSpec
from tlora.runtime.directory import replace_text
from tlora.runtime.exporting import copy
from tlora.runtime.sweeps.trials import MadeTrial
from tlora.tuning.results import Study, Winner


def keep_winner(spec: SweepSpec, study: Study, made: dict[str, MadeTrial]) -> Winner | None:
    """`DIR/winner`: adapter/, job.yaml, which trains the trial alone to the same end, and
    settings.json. None if no trial came to a value."""
    best = study.best
    if best is None:
        return None
    source = adapter_of(study.output / best.name, kept_best=spec.search.objective.keeps_best)
    if source is None:
        return None
    folder = study.output / "winner"
    folder.mkdir(exist_ok=True)
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
        "step": best.step,
        "adapter_from": str(source.relative_to(study.output)),
        "command": command,
    }
    replace_text(folder / "settings.json", json.dumps(settings, indent=2) + "\n")
    return Winner(adapter=str(folder / "adapter"), job_file=str(job_file), command=command)


def adapter_of(folder: Path, *, kept_best: bool) -> Path | None:
    """The best adapter where that is what the trial is worth, else its last."""
    for name in ("best", "adapter") if kept_best else ("adapter", "best"):
        if (folder / name).is_dir():
            return folder / name
    return None
