"""What a device has to show before it trains, on a device.

python -m pytest tests/gpu/test_proving.py -q -s      # prints what was compared, and how long
"""

import gc
import logging
import time

import pytest
import torch

from tlora.kernels import cache
from tlora.kernels.multi_lora import choices, proving, routes, settling
from tlora.kernels.multi_lora.devices import limits
from tlora.kernels.multi_lora.routes import kernels_serve
from tlora.kernels.multi_lora.settings import inside_ways

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
GROUPS = [(4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,))]
"""Of an 8B model."""

MOST_SECONDS = 120.0
"""Nearly all of it compiles what a run needs too."""


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path))
    monkeypatch.delenv("TLORA_PROVE_KERNELS", raising=False)
    monkeypatch.setattr(routes, "_refused", set())
    proving._proven_ways.cache_clear()
    yield torch.device("cuda", torch.cuda.current_device())
    proving._proven_ways.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_this_device_is_right(fresh, caplog, dtype):
    """Every way that its products may take, though not all do by default."""
    gc.collect()  # What tests before it have left.
    held, began = torch.cuda.memory_allocated(), time.monotonic()
    with caplog.at_level(logging.INFO):
        proving.prove_kernels(fresh, dtype, GROUPS)
        for group in GROUPS if dtype.itemsize == 2 else []:
            ways = inside_ways(*group, limits(fresh), every=True)
            assert proving.proven_ways(fresh, dtype, group, ways) == ways, caplog.text
    print(f"\n{caplog.text}{dtype}: {time.monotonic() - began:.1f} s")
    assert kernels_serve(fresh, 3)
    assert not [record for record in caplog.records if record.levelno > logging.INFO], caplog.text
    assert time.monotonic() - began < MOST_SECONDS
    gc.collect()
    assert torch.cuda.memory_allocated() == held
    assert choices.read_proven(cache.directory(), settling.key_of(fresh))


def test_a_product_that_is_wrong_is_seen(fresh, monkeypatch, caplog):
    """By one token of 8,192."""
    from tlora.kernels.multi_lora import triton_product

    ways = inside_ways(*GROUPS[1], limits(fresh), every=True)
    if not ways:
        pytest.skip("no product takes the update inside on this device")
    product = triton_product.product

    def wrong(ys, *arguments, **options):
        product(ys, *arguments, **options)
        ys[0][4097] = 0

    monkeypatch.setattr(triton_product, "product", wrong)
    assert proving.proven_ways(fresh, torch.bfloat16, GROUPS[1], ways) == ()
    assert "is off by" in caplog.text
