"""`DIR/report.html` of a sweep: one file that opens anywhere, offline, made from the run directory
alone, while the sweep runs too.

Tables and reasons are written here, so that they can be read without a script; curves are drawn by
assets/sweep/sweep.js with the frame of a run's report.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tlora.core.assets import REPORT, SWEEP
from tlora.core.errors import SpecError
from tlora.runtime.directory import replace_text
from tlora.runtime.figures import duration_figure, loss_figure, rate_figure
from tlora.runtime.report import Headline, embedded
from tlora.runtime.run_log import read_about
from tlora.runtime.sweeps.gantt import gantt
from tlora.runtime.sweeps.report_data import FATES, fate, report_data, shown
from tlora.runtime.sweeps.timeline import read_timeline
from tlora.store.study import read_study_log

SCRIPTS = (
    *(REPORT / name for name in ("base.js", "chart.js", "tables.js")),
    *(SWEEP / name for name in ("curves.js", "parallel.js", "saving.js", "main.js")),
)
STYLES = (REPORT / "report.css", SWEEP / "sweep.css")


@dataclass(frozen=True, slots=True)
class Row:
    place: str
    name: str
    fate: str
    words: str
    cells: list[tuple[str, object]]
    """Settings, as text and to sort by."""

    step: int
    total_steps: int
    value: float | None
    tokens_seen: int
    reason: str | None
    numbers: list[tuple[str, str]]


def is_sweep(root: Path) -> bool:
    return (root / "study.json").is_file()


def write_sweep_report(root: Path) -> Path:
    """(Re-)make the report. Raises SpecError if the directory holds no sweep."""
    about = read_about(root)
    try:
        study = json.loads((root / "study.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"{root} is not the directory of a sweep: study.json: {error}") from error
    log = read_study_log(root)
    try:
        turns, sweep = log.turns(), (log.about() or {})["spec"]
    finally:
        log.close()
    path = root / "report.html"
    if "tasks" not in study:
        timeline = timeline_data(root, about, study)
        page = render(root, about, study, sweep, report_data(study, turns), timeline)
        replace_text(path, page)
        return path
    for task in study["tasks"]:
        own = study_of_task(study, task["name"])
        data = report_data(own, [turn for turn in turns if turn.task == task["name"]])
        folder = root / "winner" / task["name"]
        folder.mkdir(parents=True, exist_ok=True)
        page = render(root, about, own, {**sweep, "task": {"name": task["name"]}}, data, None)
        replace_text(folder / "report.html", page)
    replace_text(path, render_tasks(root, about, study))
    return path


def study_of_task(study: dict[str, Any], name: str) -> dict[str, Any]:
    """A task of several as a study of its own."""
    (task,) = [each for each in study["tasks"] if each["name"] == name]
    trials = [each for each in study["trials"] if each["task"] == name]
    return {**study, **task, "trials": trials}


def timeline_data(
    root: Path, about: dict[str, Any], study: dict[str, Any]
) -> dict[str, Any] | None:
    """What is drawn of a sweep over several devices; None of one that was not."""
    if "devices" not in about:
        return None
    only = about.get("task", "trials")
    tasks = {each["name"]: each.get("task", only) for each in study["trials"]}
    found = read_timeline(root, tasks, about["devices"])
    if found is None:
        return None
    names = list(dict.fromkeys(tasks.values()))
    each = [(name, found.device_seconds(name)) for name in names]
    return {
        "picture": gantt(found, names),
        "devices": found.devices,
        "seconds": found.seconds,
        "busy_share": found.busy_share,
        "sum_s": sum(seconds for _, seconds in each),
        "each": each if len(each) > 1 else [],
        "plans": found.plans,
        "predicted_s": study.get("predicted_s"),
        "one_after_another_s": study.get("one_after_another_s"),
    }


def render_tasks(root: Path, about: dict[str, Any], study: dict[str, Any]) -> str:
    timeline = timeline_data(root, about, study)
    heads = headlines(study)[1:]
    if timeline is not None:
        note = f"{duration_figure(timeline['sum_s'])} of nano-batches in all"
        heads = [Headline("makespan", duration_figure(timeline["seconds"]), note), *heads]
    return (
        new_environment()
        .get_template("tasks.html.j2")
        .render(
            name=root.resolve().name,
            about=about,
            study=study,
            started=time.strftime("%Y-%m-%d %H:%M", time.localtime(about.get("started", 0))),
            headlines=heads,
            timeline=timeline,
            style=Markup("\n".join(each.read_text(encoding="utf-8") for each in STYLES)),
        )
    )


def new_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(SWEEP),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"loss": loss_figure, "rate": rate_figure, "duration": duration_figure}
    return environment


def render(
    root: Path,
    about: dict[str, Any],
    study: dict[str, Any],
    sweep: dict[str, Any],
    data: object,
    timeline: dict[str, Any] | None,
) -> str:
    rows = rows_of(study)
    return (
        new_environment()
        .get_template("sweep.html.j2")
        .render(
            timeline=timeline,
            name=root.resolve().name,
            about=about,
            study=study,
            sweep=sweep,
            started=time.strftime("%Y-%m-%d %H:%M", time.localtime(about.get("started", 0))),
            headlines=headlines(study),
            params=params_of(study),
            rows=rows,
            given_up=[row for row in rows if row.reason],
            rules=[(name, value) for name, value in sweep["early_exit"].items()],
            settings=json.dumps(study["best"]["params"], indent=2) if study["best"] else "",
            style=Markup("\n".join(each.read_text(encoding="utf-8") for each in STYLES)),
            scripts=[Markup(each.read_text(encoding="utf-8")) for each in SCRIPTS],
            data=embedded(data),
        )
    )


def params_of(study: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for trial in study["trials"] for name in trial["params"]))


def rows_of(study: dict[str, Any]) -> list[Row]:
    """Best first; failed ones and those of which nothing is known last."""
    sign = 1 if study["objective"]["mode"] == "min" else -1
    best = study["best"]["name"] if study["best"] else None

    def key(trial: dict[str, Any]) -> tuple[bool, float]:
        lost = trial["value"] is None or trial["status"] == "failed"
        return lost, sign * (trial["value"] or 0.0)

    rows: list[Row] = []
    for place, trial in enumerate(sorted(study["trials"], key=key), 1):
        found = fate(trial, best)
        rows.append(
            Row(
                place="" if key(trial)[0] else str(place),
                name=trial["name"],
                fate=found,
                words=FATES[found],
                cells=[cell(trial["params"].get(name)) for name in params_of(study)],
                step=trial["step"],
                total_steps=trial["total_steps"],
                value=trial["value"],
                tokens_seen=trial["tokens_seen"],
                reason=trial["reason"],
                numbers=[(name, figure(value)) for name, value in trial["numbers"].items()],
            )
        )
    return rows


def cell(value: object) -> tuple[str, object]:
    if value is None:
        return "", ""
    if isinstance(value, float):
        return f"{value:.4g}", value
    return shown(value), value if isinstance(value, int) else shown(value)


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def saved_headline(study: dict[str, Any]) -> Headline:
    """What was not trained yet was not saved."""
    tokens = f"{study['tokens_spent']:,} of {study['tokens_full']:,} tokens trained"
    if not study["over"]:
        return Headline("trained so far", f"{1 - study['saved_fraction']:.0%}", tokens)
    return Headline("saved by early exit", f"{study['saved_by_exit']:.0%}", tokens)


def headlines(study: dict[str, Any]) -> list[Headline]:
    statuses = [trial["status"] for trial in study["trials"]]
    counts = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses) if status]
    best = study["best"]
    objective = study["objective"]
    shown_best = (
        Headline(f"best {objective['metric']}", loss_figure(best["value"]), best["name"])
        if best
        else Headline(f"best {objective['metric']}", "-", "no trial came to a value")
    )
    found = [
        shown_best,
        Headline("trials", str(len(statuses)), ", ".join(counts)),
        saved_headline(study),
        Headline("time running", duration_figure(study["wall_s"])),
    ]
    if study["fusion"]:
        gain = study["fusion"]["together_rate"] / study["fusion"]["alone_rate"]
        note = f"{rate_figure(study['fusion']['alone_rate'])} tokens/s one at a time"
        found.append(Headline("saved by fusing", f"{1 - 1 / gain:.0%}", note))
    return found
