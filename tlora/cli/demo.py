"""`tlora demo`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tlora.cli.check import train_for
from tlora.cli.options import Overrides, named_directory
from tlora.cli.output import print_error, print_lines, print_table
from tlora.core.assets import DEMO
from tlora.core.job import JobSpec

if TYPE_CHECKING:
    from tlora.runtime.demo import DemoResult

HEADER = ("job", "r", "alpha", "targets", "lr", "schedule", "batch", "train for")


def demo(
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            metavar="DIR",
            parser=named_directory,
            help="Where the results go; a run that is there already is replaced.",
        ),
    ] = Path("runs/demo"),
    override: Overrides = None,
) -> None:
    """Train eight different little jobs together: no GPU, nothing to download, about a minute."""
    from tlora.config import load_spec

    spec = load_spec(DEMO / "jobs.yaml", override or ())
    title = f"{len(spec.jobs)} jobs that differ in everything, on one copy of a tiny base model:"
    print_lines([title, ""])
    print_table(HEADER, [job_row(job) for job in spec.jobs])
    print_lines([""])

    # torch loads with this.
    from tlora.runtime.demo import look_back
    from tlora.runtime.training import train

    run = train(spec, output=output, fresh=True)
    if run.interrupted:
        print_error("interrupted: the same command starts over")
        raise typer.Exit(130)
    show(look_back(spec, run))
    if run.failed:
        print_error(f"failed: {', '.join(run.failed)}; the reasons are in {output}")
        raise typer.Exit(1)


def job_row(job: JobSpec) -> list[str]:
    """What tells the jobs apart, within 80 columns."""
    lora, train = job.lora, job.train
    targets = lora.target_modules
    names = targets if isinstance(targets, str) else ",".join(targets)
    return [
        job.name,
        str(lora.r),
        f"{lora.lora_alpha:g}",
        names.replace("_proj", ""),
        f"{train.learning_rate:g}",
        train.lr_scheduler_type.replace("_with_", "+"),
        str(train.batch_size),
        train_for(train),
    ]


def show(result: "DemoResult") -> None:
    print_lines(["", "What they learnt, on rows held out from training:"])
    print_table(
        ("job", "steps", "loss before", "after", "right before", "after"),
        [
            [
                learnt.result.job,
                str(learnt.result.steps),
                loss(learnt.result.first_eval_loss),
                loss(learnt.result.eval_loss),
                f"{learnt.right_before} of {learnt.rows}",
                f"{learnt.right_after} of {learnt.rows}",
            ]
            for learnt in result.learnt
        ],
    )
    for example in result.examples:
        print_lines(
            [
                "",
                f"{example.job} was asked: {example.before.question}",
                *labelled("base model", example.before.given),
                *labelled("with adapter", example.after.given),
            ]
        )
    print_lines(["", *gain(result), "", *where_to_go(result)])


def loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def labelled(label: str, text: str) -> list[str]:
    """An answer of several lines stays in its column."""
    first, *more = text.splitlines() or [""]
    return [f"  {label:<14}{first}", *(f"  {'':<14}{line}" for line in more)]


def gain(result: "DemoResult") -> list[str]:
    found = result.comparison
    times = "once" if found.rounds == 1 else f"{found.rounds} times"
    threads = "1 CPU thread" if result.threads == 1 else f"{result.threads} CPU threads"
    return [
        f"What fusing gained here: {found.gain:.1f} times as fast as one job at a time.",
        f"  together       {found.together_rate:>8,.0f} tokens/s",
        f"  one at a time  {found.alone_rate:>8,.0f} tokens/s",
        f"  Compared: the first {found.steps} steps of all jobs, {times} each way, in the",
        f"  same engine on {threads}, without evaluation; padding is not counted.",
    ]


def where_to_go(result: "DemoResult") -> list[str]:
    root = result.run.output
    first = next((job for job in result.run.jobs.values() if job.adapter), None)
    lines = [f"Adapters, metrics and results of each job are in {root}."]
    if first is not None:
        lines.append(f"Look at one:    tlora verify {root / str(first.adapter)}")
    return [
        *lines,
        f"Try your own:   cp {root / 'resolved.yaml'} my-jobs.yaml, edit it, and",
        "                tlora train my-jobs.yaml",
    ]
