"""`tlora plan`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlora.cli.options import Overrides, PolicyOption, ProfileOption, check_place
from tlora.cli.output import print_lines, print_table
from tlora.core.errors import SpecError
from tlora.core.wording import number_of

if TYPE_CHECKING:
    from tlora.runtime.planning import PlannedGroup, PlannedJob, RunPlan
    from tlora.schedule.paper import PaperPlan
    from tlora.schedule.planner import Candidate, PlanChoice

GROUPS = ("group", "GPUs", "jobs", "nano-batch", "tokens/s", "memory", "GPUs' worth")
JOBS = ("job", "r", "batch", "steps", "group", "tokens/s", "alone", "slowdown", "time")
PLANS = ("replicas", "fsdp", "tp", "pp", "adapters", "nano-batch", "kept")
FIGURES = ("tokens/s", "to the end", "memory", "communication", "idle", "")

MOST_SHOWN = 12
"""Candidates; the JSON file has all."""


def plan(
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", min=1, help="How many there are.")],
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A job file, YAML or JSON.")
    ] = None,
    override: Overrides = None,
    profile: ProfileOption = None,
    policy: PolicyOption = "tlora",
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            metavar="S",
            help="Instead of a file: llama-1b, llama-8b, qwen-32b or llama-70b on paper.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            metavar="N",
            min=1,
            help="With --shape: how many.",
            show_default="eight for each GPU",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the plan to this file.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Write the plan of one group on all GPUs, for `tlora train --plan`.",
        ),
    ] = None,
) -> None:
    """Say what would be trained with what, on which GPUs, how fast, and why; train nothing."""
    if (file is None) == (shape is None):
        raise SpecError("name a job file, or a --shape", field="FILE")
    if jobs is not None and shape is None:
        raise SpecError("is for --shape; a job file has its own jobs", field="--jobs")
    for option, path in (("--json", json_file), ("--output", output)):
        check_place(option, path)
    if shape is not None:
        from tlora.schedule.paper import plan_on_paper

        paper = plan_on_paper(shape, gpus, jobs=jobs, profile=profile)
        _write(json_file, paper.as_json())
        _write_plan(output, paper.choice)
        show_paper(paper)
        return
    # The spec first: a typo should not wait for torch.
    from tlora.config import load_spec

    assert file is not None
    spec = load_spec(file, override or ())

    from tlora.runtime.planning import plan_run

    found = plan_run(spec, gpus=gpus, profile=profile, policy=policy)
    _write(json_file, found.as_json())
    if output is not None and found.one_group is None:
        raise SpecError("is for several GPUs: one needs no plan", field="--output")
    _write_plan(output, found.one_group)
    show(found)


def _write(path: Path | None, data: dict[str, Any]) -> None:
    if path is not None:
        path.expanduser().write_text(json.dumps(data) + "\n", encoding="utf-8")


def _write_plan(path: Path | None, choice: "PlanChoice | None") -> None:
    if path is None or choice is None:
        return
    if choice.best is None:
        raise SpecError(f"there is no plan to write: {choice.sentence}", field="--output")
    from tlora.config.plans import dump_plan

    path.expanduser().write_text(dump_plan(choice.best.plan), encoding="utf-8")


def show(found: "RunPlan") -> None:
    shape, device = found.profile.profile.shape, found.profile.profile.device
    print_lines(
        [
            f"{number_of(found.gpus, 'GPU')}, policy {found.policy}, "
            f"profile of {device} and {shape}:",
            f"  {found.profile.source}",
            "",
        ]
    )
    print_table(GROUPS, [group_row(group) for group in found.groups])
    print_lines([""])
    print_table(JOBS, [job_row(job) for job in found.jobs])
    print_lines(["", *(f"{str(each)[0].upper()}{str(each)[1:]}." for each in found.decisions)])
    if found.waiting:
        print_lines([f"Waiting for room: {', '.join(found.waiting)}."])
    total = sum(group.worth for group in found.groups)
    rate = sum(group.tokens_per_s for group in found.groups)
    print_lines(
        [f"Together {rate:,.0f} tokens/s, the work of {total:.2f} GPUs with a job alone on each."]
    )
    for group in found.groups:
        if group.inside is not None:
            show_choice(f"{group.name} on its {len(group.gpus)} GPUs:", group.inside)
    if found.one_group is not None:
        show_choice("All jobs as one group, in lock-step:", found.one_group)


def show_paper(paper: "PaperPlan") -> None:
    print_lines(
        [
            f"{paper.shape} on {paper.choice.world} x {paper.profile.device}, {paper.jobs} jobs: "
            f"{paper.workload}",
            *(f"  {note}" for note in paper.profile.notes),
            f"  {paper.links}",
        ]
    )
    show_choice("", paper.choice)


def show_choice(title: str, choice: "PlanChoice") -> None:
    """Columns that are the same everywhere are left out."""
    shown = choice.candidates[:MOST_SHOWN]
    plans = [plan_row(each) for each in shown]
    told = [place for place in range(len(PLANS)) if {row[place] for row in plans} - {"1", "0"}]
    print_lines(["", *([title] if title else [])])
    print_table(
        [*(PLANS[place] for place in told), *FIGURES],
        [
            [*(row[place] for place in told), *figures_row(each)]
            for row, each in zip(plans, shown, strict=True)
        ],
    )
    more = len(choice.candidates) - len(shown)
    print_lines([f"{more} more in the JSON file."] if more else [])
    print_lines([choice.sentence])


def plan_row(candidate: "Candidate") -> list[str]:
    plan = candidate.plan
    return [
        *(str(count) for count in (plan.replicas, plan.fsdp, plan.tp, plan.pp)),
        plan.adapters if plan.ranks > 1 else "-",
        str(plan.bucket),
        str(plan.kept_layers),
    ]


def figures_row(candidate: "Candidate") -> list[str]:
    price, memory = candidate.price, candidate.price.memory.total
    return [
        f"{price.tokens_per_s:,.0f}" if price.fits else "-",
        f"{candidate.run_tokens_per_s:,.0f}" if price.fits else "-",
        "not known" if memory is None else f"{memory / 2**30:.1f} GiB",
        f"{price.communication_share:.1%}",
        f"{price.idle_share:.1%}",
        candidate.why,
    ]


def group_row(group: "PlannedGroup") -> list[str]:
    memory = group.memory_bytes
    return [
        group.name,
        ",".join(map(str, group.gpus)),
        ",".join(group.jobs),
        str(group.plan.bucket),
        f"{group.tokens_per_s:,.0f}",
        "not known" if memory is None else f"{memory / 2**30:.1f} GiB",
        f"{group.worth:.2f}",
    ]


def job_row(job: "PlannedJob") -> list[str]:
    known = job.tokens_per_s is not None
    return [
        job.name,
        str(job.rank),
        str(job.batch_size),
        str(job.steps),
        job.group or "-",
        f"{job.tokens_per_s:,.0f}" if known else "-",
        f"{job.solo_tokens_per_s:,.0f}",
        "-" if job.slowdown is None else f"{job.slowdown:.2f}",
        "-" if job.seconds is None else f"{job.seconds:,.0f} s",
    ]
