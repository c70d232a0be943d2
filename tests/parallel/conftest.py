"""Ranks that stay for the session, and what the jobs are like without them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import rank_jobs, rank_work
from support.jobs import base_model
from support.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    found = Ranks(4)
    yield found
    found.close()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("base")
    base_model().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def alone() -> rank_jobs.Told:
    """All jobs in one process, by the ordinary engine."""
    return rank_work.train_alone(list(rank_jobs.STEPS))
