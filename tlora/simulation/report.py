"""The report of a comparison: one HTML file that opens anywhere, offline.

The table is written here, so that it can be read without a script; curves and the Gantt chart are
drawn by assets/simulation/simulation.js with the frame of the run's report.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tlora.core.assets import REPORT, SIMULATION
from tlora.core.errors import SpecError
from tlora.schedule import POLICIES
from tlora.simulation.compare import Comparison
from tlora.simulation.plots import plot_data
from tlora.simulation.table import duration, rate, ratio, sentences, title

SCRIPTS = (REPORT / "base.js", REPORT / "chart.js", SIMULATION / "simulation.js")
STYLES = (REPORT / "report.css", SIMULATION / "simulation.css")


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the table: one figure of every policy."""

    label: str
    cells: tuple[str, ...]
    best: tuple[bool, ...]
    """Which of them is better than all others, if any is."""


def write_report(comparison: Comparison, path: Path) -> None:
    """Whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(render(comparison), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}", field="--html") from None


def render(comparison: Comparison) -> str:
    environment = Environment(
        loader=FileSystemLoader(SIMULATION),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    setting = comparison.setting
    return environment.get_template("simulation.html.j2").render(
        name=setting.trace.name,
        about=title(comparison),
        policies=[(policy, POLICIES[policy].summary) for policy in setting.policies],
        lines=table_lines(comparison),
        sentences=sentences(comparison),
        setting=setting_pairs(comparison),
        style=Markup("\n".join(each.read_text(encoding="utf-8") for each in STYLES)),
        scripts=[Markup(each.read_text(encoding="utf-8")) for each in SCRIPTS],
        data=embedded(plot_data(comparison)),
    )


def embedded(data: object) -> Markup:
    """JSON that is safe inside a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def table_lines(comparison: Comparison) -> list[Line]:
    found = [comparison.mean(policy) for policy in comparison.setting.policies]

    def line(
        label: str, show: Callable[[Any], str], *names: str, least: bool | None = None
    ) -> Line:
        values: list[Any] = list(found)
        for name in names:
            values = [each[name] for each in values]
        cells = tuple(show(value) for value in values)
        known = [value for value in values if value is not None]
        if least is None or not known or len(cells) == 1:
            return Line(label, cells, (False,) * len(cells))
        top = show(min(known) if least else max(known))
        # What reads the same is no better.
        return Line(label, cells, tuple(cells.count(top) == 1 and cell == top for cell in cells))

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    def milliseconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} ms"

    def count(value: float) -> str:
        return f"{value:,.10g}"

    jct = [
        line(f"job completion time, {part}", duration, "jct_s", part, least=True)
        for part in ("mean", "p50", "p95", "p99")
    ]
    queue = [
        line(f"of that queued, {part}", duration, "queue_s", part, least=True)
        for part in ("mean", "p50", "p95", "p99")
    ]
    return [
        *jct,
        *queue,
        line("makespan", duration, "makespan_s", least=True),
        line("tokens/s of the cluster", rate, "tokens_per_s", least=False),
        line("samples/s of the cluster", _short, "samples_per_s", least=False),
        line("tokens/s of a GPU in use", _short, "tokens_per_gpu_s", least=False),
        line("GPUs busy", percent, "util_busy"),
        line("GPUs' worth of work", percent, "util_effective", least=False),
        line("slowdown, p95", ratio, "slowdown", "p95", least=True),
        line("slowdown, largest", ratio, "slowdown", "max", least=True),
        line("finish-time fairness, p95", ratio, "ftf", "p95", least=True),
        line("finish-time fairness, largest", ratio, "ftf", "max", least=True),
        line("jobs with fairness within 1.1", percent, "ftf_within", least=False),
        line("moves, pauses, resizes", count, "regroups"),
        line("standing still for them", duration, "regroup_s"),
        line("decision time, p50", milliseconds, "decision_ms", "p50"),
        line("decision time, p99", milliseconds, "decision_ms", "p99"),
        line("cuts that a scan would better", count, "cut_misses"),
        line("jobs done", count, "jobs_done"),
        line("jobs refused or failed", count, "jobs_failed"),
    ]


def setting_pairs(comparison: Comparison) -> list[tuple[str, str]]:
    setting = comparison.setting
    lengths = [min(map(min, setting.lengths)), max(map(max, setting.lengths))]
    world = setting.world

    def every(seconds: float | None) -> str:
        return "never" if seconds is None else f"{seconds / 3600:g} h"

    return [
        (
            "GPUs",
            f"{setting.gpus}, {setting.per_node} in a node, {setting.nodes_per_rack} nodes "
            "in a rack",
        ),
        ("load asked for", "arrivals as they are" if setting.load is None else f"{setting.load:g}"),
        ("predictor error", f"{setting.predictor_error:.0%}"),
        ("seeds", str(setting.seeds)),
        ("profile", f"{setting.profile_name} ({setting.profile.device}, {setting.profile.shape})"),
        (
            "tokens of a sequence",
            f"{lengths[0]} to {lengths[1]}" if lengths[0] < lengths[1] else str(lengths[0]),
        ),
        ("runnable at most", "all" if setting.max_runnable is None else str(setting.max_runnable)),
        ("a GPU fails every", every(world.gpu_mtbf_s)),
        ("and straggles every", every(world.straggle_every_s)),
    ]


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:,.{0 if value >= 100 else 1}f}"
