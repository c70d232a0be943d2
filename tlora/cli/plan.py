"""`tlora plan`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tlora.cli.options import JobFile, Overrides, PolicyOption, ProfileOption
from tlora.cli.output import print_lines, print_table
from tlora.core.errors import SpecError

if TYPE_CHECKING:
    from tlora.runtime.planning import PlannedGroup, PlannedJob, RunPlan

GROUPS = ("group", "GPUs", "jobs", "nano-batch", "tokens/s", "memory", "GPUs' worth")
JOBS = ("job", "r", "batch", "steps", "group", "tokens/s", "alone", "slowdown", "time")


def plan(
    file: JobFile,
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", min=1, help="How many there are.")],
    override: Overrides = None,
    profile: ProfileOption = None,
    policy: PolicyOption = "tlora",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the plan to this file.")
    ] = None,
) -> None:
    """Say what would be trained with what, on which GPUs, how fast, and why; train nothing."""
    # The spec first: a typo should not wait for torch.
    from tlora.config import load_spec

    spec = load_spec(file, override or ())
    if json_file is not None and not json_file.expanduser().parent.is_dir():
        raise SpecError(f"there is no directory {json_file.parent}", field="--json")

    from tlora.runtime.planning import plan_run

    found = plan_run(spec, gpus=gpus, profile=profile, policy=policy)
    if json_file is not None:
        json_file.expanduser().write_text(json.dumps(found.as_json()) + "\n", encoding="utf-8")
    show(found)


def show(found: "RunPlan") -> None:
    shape, device = found.profile.profile.shape, found.profile.profile.device
    print_lines(
        [
            f"{found.gpus} GPU{'s' if found.gpus > 1 else ''}, policy {found.policy}, "
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
