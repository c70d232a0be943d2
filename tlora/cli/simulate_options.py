"""The options of `tlora simulate`, and what is made of them. What is wrong with one is said before
anything runs."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tlora.core.errors import SpecError

if TYPE_CHECKING:
    from tlora.simulation.traces import Trace
    from tlora.simulation.world import World

HOUR_S = 3600.0

TraceFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="TRACE",
        help="A trace, .csv or .csv.gz.",
        show_default="a small one that comes with tlora",
    ),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        metavar="A,B",
        help="Policies to compare; may be given several times.",
        show_default="all of tlora, solo, fifo-memory, tlora-no-scheduler, tlora-no-kernel, srtf",
    ),
]
Gpus = Annotated[int, typer.Option(help="GPUs of the cluster.")]
PerNode = Annotated[int, typer.Option(help="GPUs of a node.")]
NodesPerRack = Annotated[int, typer.Option(help="Nodes of a rack.")]
Load = Annotated[
    float,
    typer.Option(
        help="Arrivals are stretched so that solo runs would keep this part of the GPUs busy; "
        "0 leaves them as they are."
    ),
]
PredictorError = Annotated[
    float, typer.Option(help="How wrong the policy's predictions are: 0.1 is some 10 %.")
]
Seeds = Annotated[int, typer.Option(help="Runs per policy, each with other draws.")]
SkipDays = Annotated[
    float, typer.Option(help="Leave out the first days, where a trace begins slowly.")
]
Days = Annotated[float | None, typer.Option(help="Only the first days.", show_default="all")]
Jobs = Annotated[int | None, typer.Option(help="Only the first jobs.", show_default="all")]
DeviceProfile = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Of the device and base: one that comes with tlora, or what `tlora profile` wrote.",
        show_default="h200-llama-8b",
    ),
]
Lengths = Annotated[
    str,
    typer.Option(
        metavar="N|FILE",
        help="Tokens of a sequence, or an .npz with one array of lengths per dataset.",
    ),
]
MaxRunnable = Annotated[
    int, typer.Option(help="Jobs beyond so many are not looked at until others end.")
]
Mtbf = Annotated[
    float | None,
    typer.Option(
        metavar="HOURS", help="Mean time of a GPU between failures.", show_default="never"
    ),
]
Repair = Annotated[float, typer.Option(metavar="HOURS", help="How long a failed GPU is away.")]
Straggle = Annotated[
    float | None,
    typer.Option(
        metavar="HOURS",
        help="Mean time of a GPU between hours at half speed.",
        show_default="never",
    ),
]
BadRows = Annotated[
    str, typer.Option(metavar="refuse|skip", help="What to do with bad rows of the trace.")
]
Sort = Annotated[bool, typer.Option("--sort", help="Put rows out of order in order.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")
]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a report with plots here.")
]


def policies_of(given: list[str] | None) -> tuple[str, ...]:
    from tlora.simulation.compare import COMPARED

    return tuple(name.strip() for each in given or () for name in each.split(",")) or COMPARED


def trace_of(
    file: Path | None,
    *,
    bad_rows: str,
    sort: bool,
    days: float | None,
    jobs: int | None,
    skip_days: float,
) -> "Trace":
    """That part of it that is asked for."""
    from tlora.simulation.synthetic import SMALL_TRACE
    from tlora.simulation.traces import read_trace

    if bad_rows not in ("refuse", "skip"):
        raise SpecError(f"must be refuse or skip, got '{bad_rows}'", field="--bad-rows")
    check_numbers({"--skip-days": skip_days}, zero=True)
    check_numbers({"--days": days, "--jobs": jobs})
    trace = read_trace(
        file or SMALL_TRACE, on_bad="skip" if bad_rows == "skip" else "raise", sort=sort
    )
    return trace.first(days=days, jobs=jobs, skip_days=skip_days)


def lengths_of(given: str) -> tuple[tuple[int, ...], ...]:
    """Of every dataset that a job may have."""
    from tlora.simulation.mapping import read_lengths

    if not given.isdigit():
        return tuple(read_lengths(given))
    if int(given) < 1:
        raise SpecError(f"must be at least 1, got {given}", field="--lengths")
    return ((int(given),),)


def world_of(mtbf: float | None, repair: float, straggle: float | None) -> "World":
    from tlora.simulation.world import World

    check_numbers({"--mtbf": mtbf, "--repair": repair, "--straggle": straggle})
    return World(
        gpu_mtbf_s=mtbf and mtbf * HOUR_S,
        repair_s=repair * HOUR_S,
        straggle_every_s=straggle and straggle * HOUR_S,
    )


def check_numbers(given: Mapping[str, float | None], *, zero: bool = False) -> None:
    """Options that were left out are None."""
    least = "of at least 0" if zero else "above 0"
    for name, value in given.items():
        if value is not None and not (0 < value < math.inf or (zero and value == 0)):
            raise SpecError(f"must be a number {least}, got {value}", field=name)
