"""`DIR/report.html`: a run in one file that opens anywhere, offline, made from the run directory
alone.

The figures and tables are written here, so that they can be read without a script; the curves are
drawn by the scripts in assets/report, from the numbers embedded beside them.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tlora.core.assets import REPORT
from tlora.runtime.directory import replace_text
from tlora.runtime.figures import duration_figure, loss_figure, rate_figure
from tlora.runtime.report_data import report_data
from tlora.runtime.report_tables import (
    job_rows,
    plan_text,
    preference_rows,
    rank_rows,
    setting_columns,
    shared_settings,
    traffic_rows,
)
from tlora.runtime.run_log import RunLog, read_run

SCRIPTS = (
    "base.js",
    "chart.js",
    "tables.js",
    "jobs.js",
    "loss.js",
    "throughput.js",
    "composition.js",
    "placement.js",
    "tuning.js",
    "main.js",
)


@dataclass(frozen=True, slots=True)
class Headline:
    label: str
    figure: str
    note: str = ""


def write_report(run_dir: Path) -> Path:
    """(Re-)make the report of a run, running, finished or broken off. Raises SpecError if the
    directory holds no run."""
    log = read_run(run_dir)
    path = run_dir / "report.html"
    replace_text(path, render(log))
    return path


def render(log: RunLog) -> str:
    environment = Environment(
        loader=FileSystemLoader(REPORT),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"loss": loss_figure, "rate": rate_figure, "duration": duration_figure}
    jobs = job_rows(log)
    data = report_data(log)
    return environment.get_template("report.html.j2").render(
        log=log,
        name=log.root.resolve().name,
        started=time.strftime("%Y-%m-%d %H:%M", time.localtime(log.about.get("started", 0))),
        headlines=headlines(log),
        jobs=jobs,
        # What a person cancelled is as it should be.
        troubled=[job for job in jobs if job.reason and job.status != "cancelled"],
        preferences=preference_rows(log),
        plan=plan_text(log),
        ranks=rank_rows(log),
        traffic=traffic_rows(log),
        columns=setting_columns(log),
        shared=shared_settings(log),
        style=Markup((REPORT / "report.css").read_text(encoding="utf-8")),
        scripts=[Markup((REPORT / name).read_text(encoding="utf-8")) for name in SCRIPTS],
        several_devices=data["placement"] is not None,
        data=embedded(data),
    )


def embedded(data: object) -> Markup:
    """JSON that is safe inside a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def headlines(log: RunLog) -> list[Headline]:
    batches = log.nano_batches
    tokens = sum(sum(batch.tokens.values()) for batch in batches)
    rows = sum(batch.rows for batch in batches)
    statuses = [job.status for job in job_rows(log)]
    done = sum(status in ("completed", "stopped early") for status in statuses)
    others = {
        status: statuses.count(status) for status in ("cancelled", "failed", "paused", "unfinished")
    }
    note = ", ".join(f"{count} {status}" for status, count in others.items() if count)
    shown = [
        Headline("jobs through", f"{done} of {len(statuses)}", note),
        Headline("time running", duration_figure(log.seconds), stops(log)),
    ]
    if not batches:
        return shown
    shared = [len(batch.tokens) for batch in batches]
    return [
        *shown,
        Headline("tokens", f"{tokens:,}", "evaluation included"),
        Headline("tokens/s together", rate_figure(tokens / max(log.seconds, 1e-9))),
        Headline("nano-batches", f"{len(batches):,}", f"{tokens / max(rows, 1):.0%} full"),
        Headline(
            "jobs in a nano-batch", f"{sum(shared) / len(shared):.1f}", f"at most {max(shared)}"
        ),
    ]


def stops(log: RunLog) -> str:
    count = len(log.sessions.running) - 1
    return "" if count == 0 else "resumed once" if count == 1 else f"resumed {count} times"
