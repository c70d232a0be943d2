"""A hundred jobs in one file: what they cost to start, how much is said, and what is left."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.runs import job_file, write_rows

from tlora.config import load_spec
from tlora.core.job import RunSpec
from tlora.data import prepare as preparing
from tlora.data.prepare import prepare
from tlora.model.loading import load_tokenizer
from tlora.runtime.progress import ProgressLines
from tlora.runtime.training import RunResult, train
from tlora.training.driver import JobDriver

JOBS, DATASETS = 100, 4
PAGE_BYTES = 4096
JOB_BYTES = 2 * 2**20
"""A job of this size takes a tenth of it: its rows of the pool are 60 KB, its driver little."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


class WatchedLines(ProgressLines):
    """Plain lines that keep what was said when, and the memory at the start of training."""

    def __init__(self) -> None:
        self.text = io.StringIO()
        super().__init__(self.text, every_seconds=0.5)
        self.said_before_training = 0
        self.bytes_at_start = 0

    def start(self, drivers: list[JobDriver], budget_tokens: int) -> None:
        self.said_before_training = len(self.lines())
        self.bytes_at_start = resident_bytes()
        super().start(drivers, budget_tokens)

    def lines(self) -> list[str]:
        return self.text.getvalue().splitlines()


@dataclass
class Ran:
    progress: WatchedLines = field(default_factory=WatchedLines)
    tokenised: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    bytes_before: int = 0
    result: RunResult | None = None


def count_tokenised(patch: pytest.MonkeyPatch, found: list[tuple[str, ...]]) -> None:
    """Every dataset that is looked up or tokenised is noted."""
    real = preparing._tokenised

    def noted(data, paths, *rest):
        found.append(paths)
        return real(data, paths, *rest)

    patch.setattr(preparing, "_tokenised", noted)


@pytest.fixture(scope="module")
def spec(base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """Ranks, batch sizes, seeds and splits that differ, on four files; one job fails."""
    folder = tmp_path_factory.mktemp("hundred")
    files = [write_rows(folder / f"{at}.jsonl", 20, seed=100 * at) for at in range(DATASETS)]
    jobs = [
        {
            "name": f"job-{at:03}",
            "data": {"path": str(files[at % DATASETS])},
            "lora": {"r": (1, 2, 4)[at % 3]},
            "train": {"batch_size": 1 + at % 3, "max_steps": 2, "seed": at},
            "eval": {"split": (2, 0)[at % 2]},
        }
        for at in range(JOBS)
    ]
    jobs[7]["train"] = {"learning_rate": 1e38, "max_grad_norm": None, "max_steps": 4}
    return load_spec(job_file(base, *jobs))


@pytest.fixture(scope="module")
def ran(spec: RunSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    run = Ran()
    with pytest.MonkeyPatch.context() as patch:
        count_tokenised(patch, run.tokenised)
        run.bytes_before = resident_bytes()
        output = tmp_path_factory.mktemp("runs") / "hundred"
        run.result = train(spec, output=output, progress=run.progress)
        yield run


def test_a_hundred_jobs_train_and_one_may_fail(ran: Ran) -> None:
    """Each to an adapter of its own."""
    assert ran.result is not None
    assert len(ran.result.jobs) == JOBS and ran.result.failed == ["job-007"]
    assert sum(job.adapter is not None for job in ran.result.jobs.values()) == JOBS - 1


def test_each_dataset_is_prepared_once(ran: Ran, spec: RunSpec, tmp_path: Path) -> None:
    """However many jobs learn from it; preparing job by job is noticed."""
    assert len(ran.tokenised) == DATASETS
    ran.tokenised.clear()
    tokenizer = load_tokenizer(spec.base)
    for job in spec.jobs[:10]:
        prepare(job, tokenizer, cache_dir=tmp_path)
    assert len(ran.tokenised) == 10 > DATASETS


def test_little_is_said_before_training_and_all_of_it_is_kept(ran: Ran) -> None:
    """A line for each dataset, and what there is to know of every job in the run directory."""
    assert 1 + DATASETS <= ran.progress.said_before_training <= 12
    assert ran.result is not None
    whole = (ran.result.output / "data.txt").read_text().splitlines()
    assert {line.split(":")[0] for line in whole} == {f"job-{at:03}" for at in range(JOBS)}


def test_plain_lines_do_not_grow_with_every_event(ran: Ran) -> None:
    """One line of results per job at the end; before that only the failure is named."""
    lines = ran.progress.lines()
    results = [line for line in lines if line.startswith("job-") and " after " not in line]
    named = [line for line in lines if line.startswith("job-") and " after " in line]
    assert len(results) == JOBS
    assert len(named) == 1 and named[0].startswith("job-007: failed after 1 step: ")
    ticks = sum(line.startswith("[") for line in lines)
    assert len(lines) - ticks <= JOBS + 25
    assert all("of 100 jobs running" in line for line in lines if line.startswith("["))


def test_a_job_takes_little_memory(ran: Ran) -> None:
    """At the start of training, the model and the pool of all jobs included."""
    assert ran.progress.bytes_at_start - ran.bytes_before < JOBS * JOB_BYTES


def test_the_report_of_a_hundred_jobs_stays_small(ran: Ran) -> None:
    """Every job is in it."""
    assert ran.result is not None
    report = ran.result.output / "report.html"
    assert report.stat().st_size < 1_500_000
    text = report.read_text()
    assert all(f"job-{at:03}" in text for at in range(JOBS))
    events = (ran.result.output / "events.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["kind"] == "attached" for line in events) == JOBS
