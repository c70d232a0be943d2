"""Training in half precision with the adapters' update inside the frozen products: on a GPU by
tests/gpu, here in Triton's interpreter, in a process of its own."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from support.tiny import Fed, batches, tiny_llama, train

from tlora.kernels.multi_lora import settings
from tlora.model import linear
from tlora.model.super_model import SuperModel
from tlora.training.engine import Engine

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")


@pytest.mark.skipif(INTERPRETED, reason="the kernels run in this process")
def test_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


@pytest.fixture(autouse=True)
def small_half_precision(monkeypatch: pytest.MonkeyPatch):
    """Copies of the pools in half precision, as on a GPU, and products of few tokens."""
    monkeypatch.setattr(linear, "operand_dtype", lambda *_: torch.float16)
    monkeypatch.setattr(settings, "INSIDE_TOKENS", 64)
    small = settings.Tuning(tokens=128, features=64, warps=4, stages=2, programs=1)
    monkeypatch.setattr(settings, "PRODUCT", small)


def trained(monkeypatch: pytest.MonkeyPatch, inside: str, *others: Fed) -> tuple[list[Fed], int]:
    """Two jobs beside others; how many products took the update."""
    from tlora.kernels.multi_lora import triton_product

    calls, product = [], triton_product.product
    with monkeypatch.context() as patch:
        patch.setenv("TLORA_UPDATE_INSIDE", inside)
        patch.setattr(
            triton_product, "product", lambda *a, **o: calls.append(o) or product(*a, **o)
        )
        jobs = [Fed("one", batches(1, [2, 2]), rank=4), Fed("two", batches(2, [3, 1]), rank=16)]
        train(Engine(SuperModel(tiny_llama().half()), budget_tokens=128), [*jobs, *others])
    return jobs, len(calls)


@interpreted
def test_jobs_train_as_with_adapters_first(monkeypatch):
    """To the noise of half precision; and by those products. A neighbour whose weights grow beyond
    half precision fails alone."""
    usual, none = trained(monkeypatch, "0")
    inside, some = trained(monkeypatch, "1")
    # Of each layer and nano-batch: o, gate and up forward, down backward.
    assert none == 0 and some == 2 * 2 * 4
    for one, other in zip(usual, inside, strict=True):
        assert other.losses == pytest.approx(one.losses, rel=1e-3)
        assert other.losses[1] != one.losses[1]
    wild = Fed("wild", batches(3, [1, 1]), rank=5, learning_rate=1e6)
    beside, _ = trained(monkeypatch, "1", wild)
    assert wild.failure is not None
    for one, other in zip(inside, beside, strict=True):
        assert other.failure is None
        assert other.losses == pytest.approx(one.losses, rel=1e-3)
