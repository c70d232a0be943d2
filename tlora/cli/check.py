"""`tlora check`."""

from pathlib import Path

from tlora.cli.options import JobFile, Overrides
from tlora.cli.output import print_lines, print_table
from tlora.core.job import JobSpec, TrainSpec
from tlora.core.wording import number_of

HEADER = ("job", "data", "r", "alpha", "targets", "lr", "schedule", "batch", "length", "train for")


def check(file: JobFile, override: Overrides = None) -> None:
    """Check a job file and its data; train nothing."""
    # The spec first: a typo should not wait for torch.
    from tlora.config import load_spec

    spec = load_spec(file, override or ())
    print_lines([f"{file}: base {spec.base}, jobs {len(spec.jobs)}"])
    print_table(HEADER, [job_row(job) for job in spec.jobs])

    from tlora.runtime.checking import check_run

    print_lines(check_run(spec))


def job_row(job: JobSpec) -> list[str]:
    """What most often tells jobs apart."""
    lora, train = job.lora, job.train
    targets = lora.target_modules
    return [
        job.name,
        short_data(job.data.paths),
        str(lora.r),
        f"{lora.lora_alpha:g}",
        targets if isinstance(targets, str) else ",".join(targets),
        f"{train.learning_rate:g}",
        train.lr_scheduler_type,
        str(train.batch_size),
        str(train.max_length),
        train_for(train),
    ]


def train_for(train: TrainSpec) -> str:
    if train.max_steps:
        return number_of(train.max_steps, "step")
    return number_of(train.num_train_epochs, "epoch")


def short_data(paths: tuple[str, ...]) -> str:
    """The first file by its name, and how many more."""
    first = Path(paths[0]).name if Path(paths[0]).is_absolute() else paths[0]
    return first if len(paths) == 1 else f"{first} +{len(paths) - 1}"
