"""`isolation: exact` from a job file to adapters on disk: the same bits in any company, after any
kill, with one thread and with two."""

from pathlib import Path

import pytest
import torch
from support.kills import carry_out, same_end
from support.runs import job_file, write_rows

from tlora.config import load_spec
from tlora.runtime.threads import using_threads
from tlora.runtime.training import train

KILLS = 5
SUBJECT = {
    "name": "subject",
    "lora": {"r": 4, "lora_dropout": 0.2},
    "train": {"batch_size": 3, "seed": 5},
    "eval": {"split": 4, "steps": 4},
}
NEIGHBOURS = {
    "wide": {"name": "wide", "lora": {"r": 8}, "train": {"batch_size": 5}},
    "one": {"name": "one", "lora": {"r": 1}, "train": {"batch_size": 1, "seed": 3}},
    "brief": {"name": "brief", "train": {"max_steps": 2, "batch_size": 7}},
}
COMPANIES = {
    "alone": ("subject",),
    "first": ("subject", "wide", "one"),
    "last": ("one", "brief", "wide", "subject"),
    "between": ("brief", "subject", "wide"),
}


def company(base: Path, rows: Path, names: tuple[str, ...]) -> dict:
    jobs = {"subject": SUBJECT, **NEIGHBOURS}
    file = job_file(base, *({**jobs[name], "data": {"path": str(rows)}} for name in names))
    file["defaults"]["train"]["max_steps"] = 10
    file["defaults"]["save"] = {"steps": 1}
    file["engine"] = {"device": "cpu", "isolation": "exact", "nano_batch_tokens": 96}
    return file


@pytest.mark.multi_process
@pytest.mark.parametrize("threads", [1, 2])
def test_a_job_has_the_same_bits_in_any_company_and_after_five_kills(
    threads, base, tmp_path
) -> None:
    """Alone, in three companies and through five seeded kills: the same curves and adapter files. A
    twin that cuts its sums by company is refused by the same comparison."""
    rows = write_rows(tmp_path / "rows.jsonl", 16)
    files = {name: company(base, rows, names) for name, names in COMPANIES.items()}
    files |= {"killed": files["first"], "leaking": files["first"]}
    outcomes = carry_out(
        tmp_path,
        files,
        threads=threads,
        killed={"kills": KILLS, "seed": 12, "nano_batches": 5, "saves": "subject"},
        leaking={"leaks": True},
    )
    assert outcomes["killed"]["killed"] == KILLS
    assert len({found["subject"] for found in outcomes["killed"]["found"]}) > 1
    for name in ("first", "last", "between", "killed"):
        assert same_end(tmp_path / name, tmp_path / "alone", "subject"), name
    for job in ("wide", "one"):
        assert same_end(tmp_path / "killed", tmp_path / "first", job)
    assert not same_end(tmp_path / "leaking", tmp_path / "alone", "subject")


def test_a_job_of_any_rank_has_the_same_bits_with_one_thread_and_with_two(base, tmp_path) -> None:
    """Libraries cut some products, and some rows of attention, over threads in ways that show."""
    rows = write_rows(tmp_path / "rows.jsonl", 16)
    jobs = [
        {"name": f"r{rank}", "data": {"path": str(rows)}, "lora": {"r": rank}}
        for rank in (5, 6, 10)
    ]
    spec = load_spec(job_file(base, *jobs, engine={"isolation": "exact", "nano_batch_tokens": 64}))
    for threads in (1, 2):
        with using_threads(threads):
            train(spec, output=tmp_path / str(threads))
            assert torch.get_num_threads() == threads
    assert all(same_end(tmp_path / "1", tmp_path / "2", job.name) for job in spec.jobs)
