"""A tiny base on disk and a cache that belongs to the tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import save_base
from support.runs import quiet_single_thread, write_rows
from support.waiting import PATIENCE_S

from tlora.runtime.executors import processes
from tlora.runtime.group import supervisor


@pytest.fixture(scope="package", autouse=True)
def single_thread() -> Iterator[None]:
    yield from quiet_single_thread()


@pytest.fixture(scope="package", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TLORA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="package", autouse=True)
def patient_supervisor() -> Iterator[None]:
    """On a busy machine a rank or a worker may be silent, or save its jobs, for longer than in a
    run that matters to somebody."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "HANG_S", PATIENCE_S)
        for name in ("HANG_S", "GRACE_S"):
            patch.setattr(supervisor, name, PATIENCE_S)
        yield


@pytest.fixture(scope="package")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="package")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", 20)
