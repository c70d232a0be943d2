"""What follows from the comparison, which test_triton_proving.py runs: here the fault is given."""

import json
import logging
from collections.abc import Callable

import pytest
import torch

from tlora.kernels import cache
from tlora.kernels.multi_lora import Group, Routes, Segment, choices, proving, routes, settling
from tlora.kernels.multi_lora.proof import Case
from tlora.kernels.multi_lora.routes import kernels_serve, operand_dtype

CPU = torch.device("cpu")
HALF = torch.float16
GROUPS = [(64, (64, 16, 16)), (64, (256, 256)), (256, (64,))]
KEY = {"device": "one", "torch": "2"}


@pytest.fixture(autouse=True)
def asked(monkeypatch, tmp_path):
    """Of a device that is none, in a process that knows nothing yet."""
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path))
    monkeypatch.setattr(proving, "_is_asked", lambda device: True)
    monkeypatch.setattr(settling, "key_of", lambda device: KEY)
    monkeypatch.setattr(routes, "triton_serves", lambda device: True)
    monkeypatch.setattr(routes, "_refused", set())
    proving._proven_ways.cache_clear()
    yield
    proving._proven_ways.cache_clear()


@pytest.fixture
def compared(monkeypatch) -> Callable[[str | Exception | None], list[Case]]:
    """The cases that were compared, with this outcome."""

    def give(outcome):
        cases = []

        def find_fault(case):
            cases.append(case)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(proving, "find_fault", find_fault)
        return cases

    return give


def a_route():
    segment = Segment(start=0, stop=5, a_row=0, ranks=(8,), b_rows=(0,), scale=1.0)
    return Routes(CPU).write(Group(256, (64,), max_rank=8, dropout=False), [segment], 5)


def test_right_kernels_serve_and_are_compared_once(compared, caplog):
    cases = compared(None)
    with caplog.at_level(logging.INFO):
        proving.prove_kernels(CPU, HALF, GROUPS)
        assert proving.proven_ways(CPU, HALF, (256, (64,)), ("backward",)) == ("backward",)
    assert [(case.group, case.tokens, case.dropout, case.ways) for case in cases] == [
        ((64, (256, 256)), proving.TOKENS, 0.0, ()),
        ((64, (256, 256)), proving.TOKENS, proving.DROPOUT, ()),
        ((256, (64,)), 8192, 0.0, ("backward",)),
    ]
    assert [record.levelname for record in caplog.records] == ["INFO"] * 3
    assert kernels_serve(CPU, 3) and not a_route().is_table
    proving._proven_ways.cache_clear()
    proving.prove_kernels(CPU, HALF, GROUPS)
    assert proving.proven_ways(CPU, HALF, (256, (64,)), ("backward",)) == ("backward",)
    assert len(cases) == 3, "the file says so"
    proving.proven_ways(CPU, torch.bfloat16, (256, (64,)), ("backward",))
    proving.proven_ways(CPU, HALF, (256, (64,)), ("forward", "backward"))
    assert len(cases) == 5, "of another format, and of other products"


def test_another_device_or_version_is_compared_again(compared, monkeypatch):
    cases = compared(None)
    proving.prove_kernels(CPU, HALF, GROUPS)
    monkeypatch.setattr(settling, "key_of", lambda device: {**KEY, "torch": "3"})
    proving.prove_kernels(CPU, HALF, GROUPS)
    assert len(cases) == 4


def test_wrong_kernels_do_not_serve(compared, caplog):
    cases = compared("dX is off by 0.7")
    proving.prove_kernels(CPU, HALF, GROUPS)
    assert len(cases) == 1
    assert "wrong on this device" in caplog.text and "dX is off by 0.7" in caplog.text
    assert not kernels_serve(CPU, 1) and a_route().is_table
    assert not routes._refused & {torch.device("cuda", 1)}, "others do"
    proving.prove_kernels(CPU, HALF, GROUPS)
    assert len(cases) == 1, "nothing is left to compare"


def test_wrong_kernels_are_compared_at_every_start(compared, monkeypatch, caplog):
    cases = compared("dX is off by 0.7")
    for _ in range(2):
        monkeypatch.setattr(routes, "_refused", set())
        proving.prove_kernels(CPU, HALF, GROUPS)
    assert len(cases) == 2


def test_pools_of_a_device_without_them_are_in_float32(monkeypatch):
    cuda = torch.device("cuda", 0)
    assert operand_dtype(cuda, HALF, 3) == HALF
    routes.refuse_kernels(cuda)
    assert operand_dtype(cuda, HALF, 3) == torch.float32


@pytest.mark.parametrize("outcome", ["dX is off by 0.7", RuntimeError("no memory")])
def test_wrong_products_are_told_of_once_and_go_the_other_way(compared, caplog, outcome):
    """Or those that nobody could look at: there is another way."""
    cases = compared(outcome)
    for _ in range(32):
        assert proving.proven_ways(CPU, HALF, (256, (64,)), ("backward",)) == ()
    assert len(cases) == len(caplog.records) == 1
    assert "256 to 64 features" in caplog.text and str(outcome) in caplog.text
    assert kernels_serve(CPU, 1), "the others serve"


def test_kernels_that_could_not_be_compared_serve(compared, caplog):
    """Without them training would be slow for no reason that anybody saw."""
    compared(torch.OutOfMemoryError("no memory"))
    proving.prove_kernels(CPU, HALF, GROUPS)
    assert kernels_serve(CPU, 1)
    assert "could not be tried out: no memory" in caplog.text


def test_groups_that_no_kernel_serves_are_not_compared(compared):
    cases = compared("wrong")
    proving.prove_kernels(CPU, HALF, [(64, (64,) * 4)])
    proving.prove_kernels(CPU, HALF, [])
    assert proving.proven_ways(CPU, HALF, (64, (64,)), ()) == ()
    assert not cases


def test_nothing_is_asked_of_a_cpu_or_against_the_users_will(monkeypatch, compared):
    cases = compared("wrong")
    monkeypatch.undo()
    assert not proving._is_asked(CPU)
    cuda = torch.device("cuda", 0)
    monkeypatch.delenv("TLORA_PROVE_KERNELS", raising=False)
    assert proving._is_asked(cuda)
    monkeypatch.setenv("TLORA_PROVE_KERNELS", "0")
    assert not proving._is_asked(cuda)
    assert proving.proven_ways(cuda, HALF, (64, (64,)), ("backward",)) == ("backward",)
    assert not cases


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"key": {}, "proven": []}', json.dumps({"key": KEY, "proven": "all"})],
)
def test_a_file_that_is_not_ours_proves_nothing(compared, caplog, content):
    folder = cache.directory()
    folder.mkdir(parents=True)
    path = choices._proven_path(folder, KEY)
    path.write_text(content)
    cases = compared(None)
    proving.prove_kernels(CPU, HALF, GROUPS)
    assert len(cases) == 2 and "is not used" in caplog.text
    assert json.loads(path.read_text())["proven"] == sorted(case.name for case in cases)


def test_where_nothing_can_be_kept_kernels_serve(compared, monkeypatch, tmp_path):
    (tmp_path / "kernels").write_text("a file")
    cases = compared(None)
    for _ in range(2):
        proving.prove_kernels(CPU, HALF, GROUPS)
    assert len(cases) == 4 and kernels_serve(CPU, 1)
