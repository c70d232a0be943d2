"""Training in half precision with the adapters' update inside the frozen products: on a GPU by
tests/gpu, here in Triton's interpreter, in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from support.tiny import Fed, batches, distance, drive, tiny_llama

from tlora.kernels.multi_lora import settings
from tlora.model import linear
from tlora.model.adapters import AdapterWeights
from tlora.model.super_model import SuperModel
from tlora.training import optimiser
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


def jobs(sizes: list[int]) -> list[Fed]:
    return [Fed("one", batches(1, sizes), rank=4), Fed("two", batches(2, sizes), rank=16)]


def trained(
    monkeypatch: pytest.MonkeyPatch, inside: str, jobs: list[Fed], *, b: float = 0.0, ahead: int = 0
) -> list[AdapterWeights]:
    """What becomes of the adapters, from B of about this size."""
    monkeypatch.setenv("TLORA_UPDATE_INSIDE", inside)
    engine = Engine(SuperModel(tiny_llama().half()), budget_tokens=128, ahead=ahead)
    for job in jobs:
        weights = engine.super_model.new_adapter(job.spec)
        for path, pair in weights.items():
            generator = torch.Generator().manual_seed(len(path))
            pair.b.normal_(std=b, generator=generator)
        job.attach(engine, weights=weights)
    list(drive(engine, jobs))
    return [engine.super_model.weights(job.name) for job in jobs if job.failure is None]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Those that took the update."""
    from tlora.kernels.multi_lora import triton_product

    calls, product = [], triton_product.product
    monkeypatch.setattr(
        triton_product, "product", lambda *a, **o: calls.append(o["update"]) or product(*a, **o)
    )
    return calls


NOISE = 2e-3
"""Between two adapters after a step half precision made 6e-4, and a lost update 0.1. Adam follows
the size of a gradient here (support/tiny.py), so one that is off shows."""


# Of each of two layers q, k and v together, o and down backward, but nobody asks for what comes
# before the first q, k and v; or all four groups, forward too.
@interpreted
@pytest.mark.parametrize(("inside", "count"), [("1", 2 * 3 - 1), ("all", 2 * (4 + 4) - 1)])
def test_jobs_train_as_with_adapters_first(monkeypatch, products, inside, count):
    """Losses, and adapters after a step: all gradients of layers but the last have gone through
    products backward."""
    usual, there = jobs([2]), jobs([2])
    wanted = trained(monkeypatch, "0", usual, b=0.3)
    assert not products
    found = trained(monkeypatch, inside, there, b=0.3)
    assert len(products) == count
    for one, other in zip(usual, there, strict=True):
        assert other.losses == pytest.approx(one.losses, rel=2e-3)
        assert (other.losses != one.losses) == (inside == "all"), "products of Y, if they have it"
    assert all(each < NOISE for each in map(distance, found, wanted))


@interpreted
@pytest.mark.parametrize("lost", ["linears_with_update", "input_gradient_with_update"])
def test_an_update_that_is_lost_would_show(monkeypatch, lost):
    """The twins: products forward, and backward, that leave it out."""
    from tlora.kernels.multi_lora import triton_product

    wanted = trained(monkeypatch, "0", jobs([2]), b=0.3)
    whole, product = getattr(triton_product, lost), triton_product.product

    def without(*arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(
                triton_product, "product", lambda *a, update, **options: product(*a, **options)
            )
            return whole(*arguments, **options)

    monkeypatch.setattr(triton_product, lost, without)
    found = trained(monkeypatch, "all", jobs([2]), b=0.3)
    assert max(map(distance, found, wanted)) > 20 * NOISE


def beside_a_wild_one(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Fed], Fed]:
    """Two jobs in the middle of their batches, while the weights of a third have grown beyond half
    precision and the host does not know it yet."""
    there = jobs([9])
    wild = Fed("wild", batches(3, [1, 1, 1]), rank=5, learning_rate=1e6)
    # Where B is zero, A has no gradient to grow by.
    trained(monkeypatch, "all", [*there, wild], b=0.3, ahead=1)
    return there, wild


@interpreted
def test_a_neighbour_whose_weights_are_no_numbers_fails_alone(monkeypatch):
    there, wild = beside_a_wild_one(monkeypatch)
    assert wild.failure is not None and "weights are no longer finite" in str(wild.failure)
    assert all(job.failure is None and np.isfinite(job.losses).all() for job in there)


@interpreted
def test_copies_that_hold_what_is_no_number_would_show(monkeypatch):
    """The twin: copies as they would be if a step just copied. Pages of the others hold some of
    those rows of A."""
    step_jobs = optimiser.step_jobs

    def copied(rows, due):
        norms = step_jobs(rows, due)
        for matrix in (each for pool in rows.adapters.pools for each in pool.matrices):
            matrix.operand.detach().copy_(matrix.value)
        return norms

    monkeypatch.setattr(optimiser, "step_jobs", copied)
    there, _ = beside_a_wild_one(monkeypatch)
    assert any(job.failure is not None for job in there)


@pytest.fixture
def proving(monkeypatch: pytest.MonkeyPatch, tmp_path) -> ModuleType:
    """Asked of this device as of a GPU, in a process that knows nothing yet."""
    from tlora.kernels.multi_lora import proving, settling

    monkeypatch.setenv("TLORA_CACHE", str(tmp_path))
    monkeypatch.setattr(proving, "_is_asked", lambda device: True)
    monkeypatch.setattr(settling, "key_of", lambda device: {"device": "this"})
    proving._proven_ways.cache_clear()
    return proving


@interpreted
def test_products_that_are_right_take_it(monkeypatch, proving, products, caplog):
    monkeypatch.setattr(linear, "prove_kernels", lambda *_: None)
    trained(monkeypatch, "all", jobs([2]), b=0.3)
    assert products and not caplog.records


@interpreted
def test_products_that_are_wrong_do_not_and_jobs_train(monkeypatch, proving, caplog):
    """Wrong by one token of many."""
    from tlora.kernels.multi_lora import triton_product

    product = triton_product.product

    def wrong(*arguments, **options):
        product(*arguments, **options)
        arguments[0][0][-1] = 0

    usual, there = jobs([2]), jobs([2])
    wanted = trained(monkeypatch, "0", usual, b=0.3)
    monkeypatch.setattr(triton_product, "product", wrong)
    monkeypatch.setattr(linear, "prove_kernels", lambda *_: None)
    found = trained(monkeypatch, "all", there, b=0.3)
    assert all(distance(*pair) == 0.0 for pair in zip(found, wanted, strict=True))
    # q, k and v; o; gate and up; down.
    assert caplog.text.count("do not take the adapters' update inside on this device") == 4


@interpreted
def test_kernels_that_are_wrong_are_not_used_and_jobs_train(monkeypatch, proving, caplog, tmp_path):
    """By plain products, whose adapters are in float32."""
    from tlora.kernels.multi_lora import routes, triton_forward

    wanted = trained(monkeypatch, "0", jobs([2]), b=0.3)
    expand = triton_forward.expand

    def wrong(out, *arguments, **options):
        expand(out, *arguments, **options)
        out[0][-1] = 0

    monkeypatch.setattr(triton_forward, "expand", wrong)
    monkeypatch.setattr(routes, "_refused", set())
    # The first run has left word that they are right.
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(linear, "operand_dtype", routes.operand_dtype)
    found = trained(monkeypatch, "all", jobs([2]), b=0.3)
    assert "kernels are wrong on this device and are not used" in caplog.text
    assert all(each < NOISE for each in map(distance, found, wanted))
