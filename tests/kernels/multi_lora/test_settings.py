"""Settings of the kernels are answered for any shape, from the shape alone."""

import dataclasses
import itertools

import pytest

from tlora.kernels.multi_lora import settings
from tlora.kernels.multi_lora.blocks import Tiles
from tlora.kernels.multi_lora.settings import Shape, Tuning, tuning

KERNELS = ("shrink", "expand_y", "expand_dx", "reduce_a", "reduce_b", "sum")


def shapes():
    for rank, size, pool, dropout in itertools.product(
        (1, 16, 17, 256), (2, 4), (2, 4), (False, True)
    ):
        yield Shape(
            num_tokens=2048,
            max_rank=rank,
            width=3 * rank,
            itemsize=size,
            pool_itemsize=pool,
            dropout=dropout,
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_shape_has_settings(kernel):
    assert all(isinstance(tuning(kernel, shape), Tuning) for shape in shapes())


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_kernel_starts_programs_without_work(kernel):
    """Grids follow the device: a list has room for 64 jobs times every tile, and few are there."""
    assert all(tuning(kernel, shape).programs > 0 for shape in shapes())


def test_every_line_of_the_table_is_used():
    used = {id(tuning(kernel, shape)) for kernel in KERNELS for shape in shapes()}
    unused = [name for name, t in settings.TUNINGS.items() if id(t) not in used]
    assert unused == []
    assert id(dataclasses.replace(settings.TUNINGS["sum"])) not in used, "the check sees objects"


@pytest.mark.parametrize(
    ("num_tokens", "chunk"), [(1, 256), (2048, 512), (8192, 1024), (65536, 1024)]
)
def test_chunks_grow_with_the_bucket_to_a_bound(num_tokens, chunk):
    assert settings.chunk_tokens(num_tokens) == chunk
    assert Tiles.for_tokens(num_tokens).chunk_tokens == chunk
