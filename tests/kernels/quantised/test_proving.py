"""What a device has to show before weights are quantised there, and what becomes of one that fails.

A CPU stands for the device: what is looked for is the same."""

import logging

import pytest
import torch

from tlora.kernels.quantised import devices, fp8, nf4, proving

CPU = torch.device("cpu")
pytest.importorskip("triton", reason="Triton is not installed: pip install '.[test]'")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch):
    """The modules of the kernels, with the definitions in place of what they launch."""
    from tlora.kernels.quantised import triton_fp8, triton_nf4

    monkeypatch.setattr(triton_fp8, "quantise_rows", fp8.quantise_rows_plainly)
    monkeypatch.setattr(triton_nf4, "dense", nf4.dense)
    return triton_fp8, triton_nf4


@pytest.fixture
def as_a_device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Looked at as if it were a GPU, and forgotten afterwards."""
    device = torch.device("cuda", 7)
    monkeypatch.setattr(devices, "_without_kernels", set())
    monkeypatch.setattr(devices, "_without_products", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device.index)
    for find in ("kernel_fault", "product_fault"):
        right = getattr(proving, find)
        monkeypatch.setattr(proving, find, lambda _, *how, right=right: right(CPU, *how))
    proving._prove.cache_clear()
    yield device
    proving._prove.cache_clear()


@pytest.mark.parametrize("how", ["fp8", "nf4"])
def test_what_is_right_is_used(kernels, as_a_device, how, caplog):
    proving.prove(as_a_device, how)
    assert devices.device_serves(as_a_device)
    assert devices.has_products(as_a_device)
    assert not caplog.records


@pytest.mark.parametrize(
    ("how", "said"), [("fp8", "quantised rows differ"), ("nf4", "unpacked values differ")]
)
def test_kernels_that_are_wrong_are_not_used(kernels, as_a_device, how, said, monkeypatch, caplog):
    """By one last bit; the products are still there."""
    triton_fp8, triton_nf4 = kernels

    def off(parts, factors=None):
        found, scales = fp8.quantise_rows_plainly(parts, factors)
        return found, scales * 1.0000002

    monkeypatch.setattr(triton_fp8, "quantise_rows", off)
    monkeypatch.setattr(triton_nf4, "dense", lambda *case: nf4.dense(*case) * 1.01)
    with caplog.at_level(logging.WARNING):
        proving.prove(as_a_device, how)
    assert not devices.device_serves(as_a_device)
    assert devices.has_products(as_a_device)
    assert said in caplog.text


@pytest.mark.parametrize("dtype", proving.DTYPES)
def test_kernels_have_to_be_right_in_every_format(kernels, as_a_device, dtype, monkeypatch, caplog):
    """A model in bfloat16 is probed in float32; another is trained in float16."""

    def off(packed, scales, shape, wanted):
        found = nf4.dense(packed, scales, shape, wanted)
        return found * 1.01 if wanted == dtype else found

    monkeypatch.setattr(kernels[1], "dense", off)
    proving.prove(as_a_device, "nf4")
    assert not devices.device_serves(as_a_device)
    assert f"unpacked values differ in {str(dtype).removeprefix('torch.')}" in caplog.text


def test_a_device_without_a_number_is_the_one_that_tensors_are_on(
    kernels, as_a_device, monkeypatch
):
    """`cuda`, as a job file says it: what is refused there is looked up by where weights are."""
    right = fp8.product
    monkeypatch.setattr(fp8, "product", lambda *case: right(*case) * 1.01)
    monkeypatch.setattr(
        kernels[0], "quantise_rows", lambda parts, factors: fp8.quantise_rows_plainly(parts)
    )
    proving.prove(torch.device("cuda"), "fp8")
    assert not devices.device_rounds(as_a_device)
    assert not devices.has_products(as_a_device)


def test_kernels_that_do_not_run_are_not_used(kernels, as_a_device, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("no such instruction\nat line 7")

    monkeypatch.setattr(kernels[1], "dense", broken)
    proving.prove(as_a_device, "nf4")
    assert not devices.device_serves(as_a_device)
    assert "RuntimeError: no such instruction" in caplog.text
    assert "line 7" not in caplog.text


def test_products_that_are_wrong_are_not_used(kernels, as_a_device, monkeypatch, caplog):
    """By one per cent; weights are still quantised by the kernels."""
    right = fp8.product
    monkeypatch.setattr(fp8, "product", lambda *case: right(*case) * 1.01)
    proving.prove(as_a_device, "fp8")
    assert devices.device_serves(as_a_device)
    assert not devices.has_products(as_a_device)
    assert "a product is off by 0.0" in caplog.text


def test_products_that_drop_some_of_a_long_sum_are_not_used(
    kernels, as_a_device, monkeypatch, caplog
):
    """Of values of one sign, as fast sums do; others cancel each other."""
    right = fp8.product

    def dropping(left, right_, *scales):
        found = right(left, right_, *scales)
        return found * 0.99 if (left.float() >= 0).all() else found

    monkeypatch.setattr(fp8, "product", dropping)
    proving.prove(as_a_device, "fp8")
    assert not devices.has_products(as_a_device)
    assert "a long sum is off by 0.0" in caplog.text


@pytest.mark.parametrize(("capability", "products"), [((8, 0), False), ((8, 9), True)])
def test_what_older_devices_cannot_do_is_not_tried(
    as_a_device, capability, products, monkeypatch, caplog
):
    """Ampere does not compile FP8, Ada rounds twice; nobody is warned."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(proving, "kernel_fault", lambda *_: "was tried")
    proving.prove(as_a_device, "fp8")
    assert devices.device_serves(as_a_device)
    assert not devices.device_rounds(as_a_device)
    assert devices.has_products(as_a_device) is products
    assert not caplog.records
