"""Frozen products on a CPU, by either of torch's libraries."""

import pytest
import torch
import torch.nn.functional as F

from tlora.kernels import host_products
from tlora.kernels.host_products import input_gradient, linear

OUTS = (5, 12)


@pytest.fixture(params=["oneDNN", "MKL"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    chosen = request.param
    monkeypatch.setattr(host_products, "_prefers_onednn", lambda: chosen == "oneDNN")
    return chosen


def case(rows: int = 17, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(rows)
    weights = [torch.randn(out, 9, generator=generator).to(dtype) for out in OUTS]
    x = torch.randn(rows, 9, generator=generator).to(dtype)
    dy = [torch.randn(rows, out, generator=generator).to(dtype) for out in OUTS]
    return x, weights, dy


@pytest.mark.parametrize("rows", [1, 17, 300])
def test_products_are_right(library: str, rows: int) -> None:
    """Also of weights that lie the other way round, as GPT-2's; not with a linear left out."""
    x, weights, dy = case(rows)
    turned = [weight.T.contiguous().T for weight in weights]
    assert not turned[0].is_contiguous()
    bias = torch.arange(5.0)
    for kept in (weights, turned):
        wanted = (x.double() @ kept[0].double().T + bias).float()
        torch.testing.assert_close(linear(x, kept[0], bias), wanted)
        torch.testing.assert_close(linear(x, kept[0], None), wanted - bias)
        pairs = zip(dy, kept, strict=True)
        wanted = torch.stack([dy_l.double() @ weight.double() for dy_l, weight in pairs]).sum(0)
        torch.testing.assert_close(input_gradient(dy, kept), wanted.float())
        assert not torch.allclose(input_gradient(dy[:1], kept[:1]), wanted.float())


def calls_of_onednn(call) -> int:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += "mkldnn" in str(function)
            return function(*args, **(kwargs or {}))

    with Counter() as counter:
        call()
    return counter.count


def test_the_library_is_the_one_that_was_chosen(library: str) -> None:
    x, weights, dy = case()
    expected = 1 if library == "oneDNN" else 0
    assert calls_of_onednn(lambda: linear(x, weights[0], None)) == expected
    assert calls_of_onednn(lambda: input_gradient(dy, weights)) == 2 * expected


def test_a_product_that_is_recorded_has_a_gradient(library: str) -> None:
    """Of oneDNN's operator there is none."""
    x, weights, dy = case()
    leaf = x.clone().requires_grad_()
    linear(leaf, weights[0], None).backward(dy[0])
    torch.testing.assert_close(leaf.grad, dy[0] @ weights[0])
    with torch.no_grad():
        torch.testing.assert_close(linear(leaf, weights[0], None), F.linear(x, weights[0]))


@pytest.mark.parametrize("recorded", [True, False])
def test_it_is_compiled_as_a_whole(library: str, recorded: bool) -> None:
    """As in a layer with a frozen linear in tiles, in training and in evaluation."""
    x, weights, _ = case()
    compiled = torch.compile(linear, fullgraph=True)
    with torch.set_grad_enabled(recorded):
        torch.testing.assert_close(compiled(x, weights[0], None), F.linear(x, weights[0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_formats_are_torchs(library: str, dtype: torch.dtype) -> None:
    x, weights, dy = case(dtype=dtype)
    assert calls_of_onednn(lambda: linear(x, weights[0], None)) == 0
    assert torch.equal(linear(x, weights[0], None), F.linear(x, weights[0]))
    assert input_gradient(dy, weights).dtype == dtype


@pytest.mark.parametrize(
    ("vendor", "capability", "chosen"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        ("", "DEFAULT", False),
    ],
)
def test_onednn_is_for_avx512_of_others_than_intel(
    monkeypatch, vendor: str, capability: str, chosen: bool
) -> None:
    monkeypatch.setattr(host_products, "_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    host_products._prefers_onednn.cache_clear()
    assert host_products._prefers_onednn() is chosen
    host_products._prefers_onednn.cache_clear()


def test_the_vendor_is_read_off_the_processor(monkeypatch) -> None:
    text = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: any\n"
    monkeypatch.setattr(host_products.Path, "read_text", lambda self, encoding: text)
    assert host_products._vendor() == "GenuineIntel"
    monkeypatch.setattr(host_products.Path, "read_text", lambda self, encoding: "processor : 0\n")
    assert host_products._vendor() == ""
