"""How many threads torch has while jobs train."""

from collections.abc import Iterator

import pytest
import torch

from tlora.runtime import threads
from tlora.runtime.threads import using_threads


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of torch's own choice, by which a container's quota is not looked at."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(before)


def quota(monkeypatch: pytest.MonkeyPatch, cores: int | None) -> None:
    monkeypatch.setattr(threads, "cpu_quota", lambda: cores)
    monkeypatch.setattr(threads, "usable_cores", lambda: cores)


@pytest.mark.parametrize(("cores", "there"), [(2, 2), (8, 4), (None, 4)])
def test_no_more_than_a_container_may_use_at_once(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, there: int
) -> None:
    quota(monkeypatch, cores)
    with using_threads(None):
        assert torch.get_num_threads() == there
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_person_who_says_how_many_is_obeyed(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    quota(monkeypatch, 2)
    monkeypatch.setenv(variable, "4")
    with using_threads(None):
        assert torch.get_num_threads() == 4


def test_a_number_that_is_given_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    quota(monkeypatch, 2)
    with using_threads(3):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 4
