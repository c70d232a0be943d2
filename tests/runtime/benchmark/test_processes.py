"""The work over processes: dealt evenly, all of it done, as one process does it."""

import pytest

from tlora.runtime.benchmark.processes import FUSED, PEFT_PADDED, Processes, dealt, together
from tlora.runtime.benchmark.rounds import Run
from tlora.runtime.benchmark.settings import Settings
from tlora.runtime.benchmark.workload import Done, new_workload


def work(num_jobs: int = 8):
    return new_workload(
        num_jobs=num_jobs,
        ranks=(4, 8),
        batches=(1, 2, 4),
        lengths=(8, 16, 32),
        steps=3,
        dropout=0.0,
        vocabulary=100,
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_job_is_dealt_to_one_process_and_tokens_are_even(count: int) -> None:
    """No share is beyond the mean by more than the largest job."""
    whole = work()
    shares = dealt(whole, count)
    names = [job.name for share in shares for job in share.jobs]
    assert sorted(names) == sorted(job.name for job in whole.jobs)
    largest = max(whole.of([job]).tokens for job in whole.jobs)
    assert max(share.tokens for share in shares) <= whole.tokens / count + largest
    assert sum(share.tokens for share in shares) == whole.tokens


def test_more_processes_than_jobs_leave_some_without_work() -> None:
    assert [len(share.jobs) for share in dealt(work(2), 3)] == [1, 1, 0]


def test_side_by_side_the_slowest_counts() -> None:
    runs = [Run(2.0, Done(10, 2, 1)), Run(3.0, Done(5, 1, 1))]
    assert together(runs) == Run(3.0, Done(15, 3, 2))


@pytest.mark.multi_process
def test_processes_do_all_of_the_work() -> None:
    """Fused, and with PEFT."""
    pytest.importorskip("peft")
    settings = Settings(
        shape="demo", jobs=3, ranks=(2, 4), batch=(1,), lengths="24", steps=2, budget=64, threads=2
    )
    processes = Processes(settings, 2)
    try:
        fused, peft = processes.run(FUSED), processes.run(PEFT_PADDED)
    finally:
        processes.close()
    assert fused.done == peft.done == Done(tokens=3 * 2 * 24, sequences=6, steps=6)
    assert fused.seconds > 0 and peft.seconds > 0
