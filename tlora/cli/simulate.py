"""`tlora simulate`."""

import json as json_lines
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tlora.cli.output import print_lines, print_table
from tlora.core.errors import SpecError

if TYPE_CHECKING:
    from tlora.simulation import table
    from tlora.simulation.compare import Comparison, Setting

HOUR_S = 3600.0


def simulate(
    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="TRACE",
            help="A trace, .csv or .csv.gz.",
            show_default="a small one that comes with tlora",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Policies to compare.",
            show_default="all of tlora, solo, fifo-memory, tlora-no-scheduler, "
            "tlora-no-kernel, srtf",
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of the cluster.")] = 32,
    per_node: Annotated[int, typer.Option(help="GPUs of a node.")] = 8,
    nodes_per_rack: Annotated[int, typer.Option(help="Nodes of a rack.")] = 4,
    load: Annotated[
        float,
        typer.Option(
            help="Arrivals are stretched so that solo runs would keep this part of the GPUs busy; "
            "0 leaves them as they are."
        ),
    ] = 0.8,
    predictor_error: Annotated[
        float, typer.Option(help="How wrong the policy's predictions are: 0.1 is some 10 %.")
    ] = 0.0,
    seeds: Annotated[int, typer.Option(help="Runs per policy, each with other draws.")] = 1,
    skip_days: Annotated[
        float, typer.Option(help="Leave out the first days, where a trace begins slowly.")
    ] = 0.0,
    days: Annotated[
        float | None, typer.Option(help="Only the first days.", show_default="all")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Only the first jobs.", show_default="all")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Of the device and base: one that comes with tlora, or what `tlora profile` "
            "wrote.",
            show_default="h200-llama-8b",
        ),
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(
            metavar="N|FILE",
            help="Tokens of a sequence, or an .npz with one array of lengths per dataset.",
        ),
    ] = "512",
    max_runnable: Annotated[
        int, typer.Option(help="Jobs beyond so many are not looked at until others end.")
    ] = 128,
    mtbf: Annotated[
        float | None,
        typer.Option(
            metavar="HOURS", help="Mean time of a GPU between failures.", show_default="never"
        ),
    ] = None,
    repair: Annotated[
        float, typer.Option(metavar="HOURS", help="How long a failed GPU is away.")
    ] = 1.0,
    straggle: Annotated[
        float | None,
        typer.Option(
            metavar="HOURS",
            help="Mean time of a GPU between hours at half speed.",
            show_default="never",
        ),
    ] = None,
    bad_rows: Annotated[
        str, typer.Option(metavar="refuse|skip", help="What to do with bad rows of the trace.")
    ] = "refuse",
    sort: Annotated[bool, typer.Option("--sort", help="Put rows out of order in order.")] = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a report with plots here.")
    ] = None,
) -> None:
    """Replay a trace on a simulated cluster, one policy after the other, and compare."""
    # numpy loads with these.
    from tlora.simulation import table
    from tlora.simulation.compare import COMPARED, Setting, choose_profile
    from tlora.simulation.mapping import read_lengths
    from tlora.simulation.report import write_report
    from tlora.simulation.synthetic import SMALL_TRACE
    from tlora.simulation.traces import read_trace
    from tlora.simulation.world import World

    if bad_rows not in ("refuse", "skip"):
        raise SpecError(f"must be refuse or skip, got '{bad_rows}'", field="--bad-rows")
    check_numbers({"--load": load, "--skip-days": skip_days}, zero=True)
    check_numbers(
        {
            "--days": days,
            "--jobs": jobs,
            "--max-runnable": max_runnable,
            "--mtbf": mtbf,
            "--repair": repair,
            "--straggle": straggle,
        }
    )
    for name, path in (("--json", json), ("--html", html)):
        check_place(name, path)
    names = COMPARED if policy is None else tuple(each.strip() for each in policy.split(","))
    profile_name, chosen = choose_profile(profile)
    setting = Setting(
        trace=read_trace(
            trace or SMALL_TRACE, on_bad="skip" if bad_rows == "skip" else "raise", sort=sort
        ).first(days=days, jobs=jobs, skip_days=skip_days),
        policies=names,
        gpus=gpus,
        per_node=per_node,
        nodes_per_rack=nodes_per_rack,
        load=load or None,
        predictor_error=predictor_error,
        seeds=seeds,
        profile_name=profile_name,
        profile=chosen,
        lengths=((number(lengths),),) if lengths.isdigit() else tuple(read_lengths(lengths)),
        max_runnable=max_runnable,
        world=World(
            gpu_mtbf_s=mtbf and mtbf * HOUR_S,
            repair_s=repair * HOUR_S,
            straggle_every_s=straggle and straggle * HOUR_S,
        ),
    )
    found = with_bar(setting)
    print_lines([*table.title(found), ""])
    for each in (table.times(found), table.use(found)):
        print_figures(each)
        print_lines([""])
    print_lines(table.sentences(found))
    if json is not None:
        json.write_text(json_lines.dumps(found.as_json(), allow_nan=False) + "\n", encoding="utf-8")
        print_lines([f"The figures are in {json}."])
    if html is not None:
        write_report(found, html)
        print_lines([f"The report is in {html}."])


def number(text: str) -> int:
    if int(text) < 1:
        raise SpecError(f"must be at least 1, got {text}", field="--lengths")
    return int(text)


def check_numbers(given: Mapping[str, float | None], *, zero: bool = False) -> None:
    """Options that were left out are None."""
    least = "of at least 0" if zero else "above 0"
    for name, value in given.items():
        if value is not None and not (0 < value < math.inf or (zero and value == 0)):
            raise SpecError(f"must be a number {least}, got {value}", field=name)


def check_place(option: str, path: Path | None) -> None:
    """Said before the simulation, not after it."""
    if path is None:
        return
    if path.is_dir():
        raise SpecError(f"{path} is a directory; name a file", field=option)
    if not path.absolute().parent.is_dir():
        raise SpecError(f"there is no directory {path.parent}", field=option)


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
