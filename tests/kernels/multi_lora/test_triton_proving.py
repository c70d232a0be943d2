"""The comparison that a device has to pass before anything trains on it, and twins that do not."""

import re
from dataclasses import replace

import pytest
import torch
from support.interpreter import DEVICE, KERNELS_RUN, runs_kernels

from tlora.kernels.multi_lora import function, proof, settings
from tlora.kernels.multi_lora.blocks import Blocks
from tlora.kernels.multi_lora.proof import Case, find_fault

if KERNELS_RUN:
    from tlora.kernels.multi_lora import triton_backward, triton_forward, triton_product

pytestmark = pytest.mark.usefixtures("new_tensors_hold_nan")
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
BASE = Case(
    device=torch.device(DEVICE), dtype=HALF, operands=HALF, group=(72, (64, 48)), tokens=301
)
BACKWARD = replace(BASE, ways=("backward",))
BOTH = replace(BASE, ways=("forward", "backward"))


@pytest.fixture(autouse=True)
def small_products(monkeypatch):
    small = settings.Tuning(tokens=128, features=64, warps=4, stages=2, programs=1)
    monkeypatch.setattr(settings, "PRODUCT", small)


CASES = {
    "half precision": BASE,
    "dropout": replace(BASE, dropout=0.25),
    "one linear": replace(BASE, group=(56, (64,))),
    "three linears": replace(BASE, group=(64, (64, 16, 16)), ways=("backward",)),
    "float32": replace(BASE, dtype=torch.float32, operands=torch.float32),
    "copies in float32": replace(BASE, operands=torch.float32),
    "backward": BACKWARD,
    "both": BOTH,
}


@runs_kernels
@pytest.mark.parametrize("name", CASES)
def test_right_kernels_pass(name):
    assert find_fault(CASES[name]) is None


@runs_kernels
def test_the_noise_is_far_from_the_limit(monkeypatch):
    """Half of it: 5e-3 of 2e-2 in bfloat16, less in float16."""
    monkeypatch.setattr(proof, "LIMIT", proof.LIMIT / 2)
    for case in (BASE, BOTH, replace(BASE, dropout=0.25)):
        assert find_fault(case) is None


def no_update(monkeypatch):
    product = triton_product.product
    monkeypatch.setattr(
        triton_product, "product", lambda *a, update, **options: product(*a, **options)
    )


def last_token_is_lost(monkeypatch):
    """Of the products' outputs: one of 301."""
    product = triton_product.product

    def wrong(*arguments, **options):
        product(*arguments, **options)
        arguments[0][0][-1] = 0

    monkeypatch.setattr(triton_product, "product", wrong)


def different_every_time(monkeypatch):
    """In the last bits of one value."""
    product, calls = triton_product.product, []

    def wrong(*arguments, **options):
        product(*arguments, **options)
        calls.append(1)
        arguments[0][0][5, 5] *= 1 + 2e-3 * len(calls)

    monkeypatch.setattr(triton_product, "product", wrong)


def does_not_start(monkeypatch):
    def wrong(*_, **__):
        raise RuntimeError("out of resource: shared memory\nRequired: 262144")

    monkeypatch.setattr(triton_product, "product", wrong)


INSIDE_TWINS = {
    no_update: "^dX is off by [01].[0-9]*$",
    last_token_is_lost: "^dX is off by [01].[0-9]*$",
    different_every_time: "two passes give different bits",
    does_not_start: "^RuntimeError: out of resource: shared memory$",
}


@runs_kernels
@pytest.mark.parametrize("twin", INSIDE_TWINS)
def test_wrong_products_do_not(monkeypatch, twin):
    twin(monkeypatch)
    found = find_fault(BACKWARD)
    assert found is not None and re.search(INSIDE_TWINS[twin], found), found


def s_is_not_a_number(monkeypatch):
    """Of one token."""
    shrink = triton_forward.shrink

    def wrong(s, *arguments, **options):
        shrink(s, *arguments, **options)
        s[10] = float("nan")

    monkeypatch.setattr(triton_forward, "shrink", wrong)


def a_scale_is_off(monkeypatch):
    """By 6 %, of one job."""
    copy = Blocks.copy

    def wrong(blocks, segments):
        copy(blocks, [replace(segments[0], scale=1.06 * segments[0].scale), *segments[1:]])

    monkeypatch.setattr(Blocks, "copy", wrong)


def gradients_are_written_over(monkeypatch):
    """Instead of being added to."""
    backward = triton_backward.add_backward

    def wrong(dx, x, dy, s, a, b, grad_a, grad_b, *rest, **options):
        grad_a.zero_()
        return backward(dx, x, dy, s, a, b, grad_a, grad_b, *rest, **options)

    monkeypatch.setattr(triton_backward, "add_backward", wrong)


BASE_TWINS = {
    s_is_not_a_number: "Y of linear 0 is off by nan",
    a_scale_is_off: "Y of linear 0 is off by 0.0",
    gradients_are_written_over: "^dA is off by 0.50?[0-9]?$",
}


@runs_kernels
@pytest.mark.parametrize("twin", BASE_TWINS)
def test_wrong_kernels_do_not(monkeypatch, twin):
    twin(monkeypatch)
    found = find_fault(BASE)
    assert found is not None and re.search(BASE_TWINS[twin], found), found


@runs_kernels
@pytest.mark.parametrize("of", ["inputs", "results"])
def test_too_little_memory_says_nothing_about_kernels(monkeypatch, of):
    def full(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    if of == "inputs":
        monkeypatch.setattr(proof, "_segments", full)
    else:
        monkeypatch.setattr(function, "_triton_forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        find_fault(BASE)
