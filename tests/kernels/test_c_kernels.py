"""Where the kernels in C do not serve, others do, and a log says why."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.native import require_native

from tlora.kernels import cache
from tlora.kernels.attention import native as attention
from tlora.kernels.attention import native_proof as attention_proof
from tlora.kernels.multi_lora import native as adapters
from tlora.kernels.multi_lora import native_proof as adapters_proof

VALUES = torch.zeros(2, 2, 2)
KERNELS = {
    "attention": (attention, attention_proof, attention.is_compiled),
    "multi_lora": (adapters, adapters_proof, lambda: adapters.serving(VALUES) is not None),
}


@pytest.fixture(params=KERNELS)
def which(request, monkeypatch, tmp_path):
    require_native()
    native, *_ = KERNELS[request.param]
    native._native.cache_clear()
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path))
    yield request.param
    native._native.cache_clear()


def nobodys_home() -> Path:
    raise RuntimeError("no home.")


def test_where_a_compiler_is_they_serve(which: str, tmp_path, caplog) -> None:
    with caplog.at_level(logging.INFO):
        assert KERNELS[which][2]()
    assert caplog.records == []
    assert len(list((tmp_path / "kernels").glob("*.so"))) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m, which: m.setenv("TLORA_NATIVE", "0"), None),
        (
            lambda m, which: m.setenv("CC", "no-such-compiler"),
            (logging.INFO, "which is slower: no C compiler"),
        ),
        (
            lambda m, which: m.setattr(
                KERNELS[which][1], "find_fault", lambda kernels: "dX is off"
            ),
            (logging.WARNING, "/native.c is wrong on this machine and is not used: dX is off"),
        ),
    ],
    ids=["left out", "no compiler", "a fault"],
)
def test_without_them_others_serve(
    which: str, monkeypatch, caplog, change: Callable, said: tuple[int, str] | None
) -> None:
    change(monkeypatch, which)
    with caplog.at_level(logging.INFO):
        assert not KERNELS[which][2]()
    records = [(record.levelno, record.getMessage()) for record in caplog.records]
    if said is None:
        assert records == []
    else:
        ((level, message),) = records
        assert level == said[0] and said[1] in message


@pytest.mark.parametrize("part", ["adapters", "attention"])
def test_either_may_be_left_out(which: str, part: str, monkeypatch) -> None:
    """A run that began before there was the other goes on with what it had."""
    monkeypatch.setenv("TLORA_NATIVE", part)
    its = {"attention": "attention", "multi_lora": "adapters"}[which]
    assert KERNELS[which][2]() is (part == its)


@pytest.mark.parametrize("home", ["none", "a file"])
def test_without_a_place_every_process_compiles_its_own(
    which: str, home: str, monkeypatch, tmp_path, caplog
) -> None:
    """A container's user may have no home, or one that is read only."""
    (tmp_path / "file").write_text("")
    if home == "none":
        monkeypatch.delenv("TLORA_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(cache.Path, "expanduser", lambda path: nobodys_home())
    else:
        monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO):
        assert KERNELS[which][2]()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert f"{which}/native.c is compiled by every process anew" in record.getMessage()
    assert "TLORA_CACHE names another directory" in record.getMessage()
