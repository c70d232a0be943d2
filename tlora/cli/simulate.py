"""`tlora simulate`."""

import json as json_lines
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tlora.cli import simulate_options as options
from tlora.cli.options import check_place
from tlora.cli.output import print_lines, print_table

if TYPE_CHECKING:
    from tlora.simulation import table
    from tlora.simulation.compare import Comparison, Setting


def simulate(
    trace: options.TraceFile = None,
    policy: options.Policies = None,
    gpus: options.Gpus = 32,
    per_node: options.PerNode = 8,
    nodes_per_rack: options.NodesPerRack = 4,
    load: options.Load = 0.8,
    predictor_error: options.PredictorError = 0.0,
    seeds: options.Seeds = 1,
    skip_days: options.SkipDays = 0.0,
    days: options.Days = None,
    jobs: options.Jobs = None,
    profile: options.DeviceProfile = None,
    lengths: options.Lengths = "512",
    max_runnable: options.MaxRunnable = 128,
    mtbf: options.Mtbf = None,
    repair: options.Repair = 1.0,
    straggle: options.Straggle = None,
    bad_rows: options.BadRows = "refuse",
    sort: options.Sort = False,
    json: options.JsonFile = None,
    html: options.HtmlFile = None,
) -> None:
    """Replay a trace on a simulated cluster, one policy after the other, and compare."""
    # numpy loads with these.
    from tlora.simulation.compare import Setting, choose_profile
    from tlora.simulation.report import write_report

    options.check_numbers({"--load": load}, zero=True)
    options.check_numbers({"--max-runnable": max_runnable})
    check_place("--json", json)
    check_place("--html", html)
    profile_name, chosen = choose_profile(profile)
    setting = Setting(
        trace=options.trace_of(
            trace, bad_rows=bad_rows, sort=sort, days=days, jobs=jobs, skip_days=skip_days
        ),
        policies=options.policies_of(policy),
        gpus=gpus,
        per_node=per_node,
        nodes_per_rack=nodes_per_rack,
        load=load or None,
        predictor_error=predictor_error,
        seeds=seeds,
        profile_name=profile_name,
        profile=chosen,
        lengths=options.lengths_of(lengths),
        max_runnable=max_runnable,
        world=options.world_of(mtbf, repair, straggle),
    )
    found = with_bar(setting)
    print_comparison(found)
    if json is not None:
        line = json_lines.dumps(found.as_json(), allow_nan=False) + "\n"
        json.expanduser().write_text(line, encoding="utf-8")
        print_lines([f"The figures are in {json}."])
    if html is not None:
        write_report(found, html.expanduser())
        print_lines([f"The report is in {html}."])


def with_bar(setting: "Setting") -> "Comparison":
    """Jobs that are through, on standard error: a bar on a terminal, else a line per run."""
    from tlora.simulation.compare import compare

    console = Console(stderr=True)
    total = len(setting.trace.jobs)
    if not console.is_terminal:

        def say(policy: str, seed: int, done: int) -> None:
            if not done:
                seeds = "" if setting.seeds == 1 else f", seed {seed}"
                many = f"{total:,} job{'' if total == 1 else 's'}"
                print(f"{policy}{seeds}: {many}", file=sys.stderr, flush=True)

        return compare(setting, say)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("jobs"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        runs = len(setting.policies) * setting.seeds
        task = progress.add_task("", total=total * runs)
        before, last = 0, ("", 0)

        def show(policy: str, seed: int, done: int) -> None:
            nonlocal before, last
            if (policy, seed) != last:
                before += total if last[0] else 0
                last = (policy, seed)
            progress.update(task, description=f"{policy}, seed {seed}", completed=before + done)

        return compare(setting, show)


def print_comparison(found: "Comparison") -> None:
    from tlora.simulation import table

    print_lines([*table.title(found), ""])
    for each in (table.times(found), table.use(found)):
        print_figures(each)
        print_lines([""])
    print_lines(table.sentences(found))


def print_figures(figures: "table.Table") -> None:
    """Numbers to the right."""
    console = Console()
    if not console.is_terminal:
        print_table(figures.header, figures.rows)
        return
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for place, name in enumerate(figures.header):
        shown.add_column(name, justify="right" if place else "left")
    for row in figures.rows:
        shown.add_row(*(Text(cell) for cell in row), style="bold" if row[0] == "tlora" else "")
    console.print(shown)
