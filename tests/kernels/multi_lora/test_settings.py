"""Settings of the kernels are answered for any shape, from the shape alone."""

import dataclasses
import functools
import itertools

import pytest

from tlora.kernels.multi_lora import routes, settings
from tlora.kernels.multi_lora.blocks import Tiles
from tlora.kernels.multi_lora.settings import Device, Shape, Tuning, tuning

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


TILES = {  # tokens, features, warps, stages, registers, programs, parts, turned
    "shrink": (128, 64, 8, 3, 0, 2, 264, 0),
    "shrink deep": (64, 64, 4, 4, 168, 3, 264, 0),
    "shrink wide": (64, 64, 4, 3, 168, 3, 264, 0),
    "shrink float32": (128, 32, 8, 2, 0, 2, 264, 0),
    "expand_y": (64, 128, 4, 3, 128, 4, 132, 0),
    "expand_dx": (64, 128, 4, 2, 128, 4, 132, 0),
    "expand_dx stacked": (64, 128, 4, 1, 128, 4, 132, 0),
    "expand_dx dropout": (64, 128, 4, 2, 0, 8, 132, 0),
    "expand float32": (32, 64, 4, 2, 0, 8, 132, 0),
    "reduce_a small": (64, 128, 4, 3, 0, 3, 132, 0),
    "reduce_a large": (64, 128, 4, 3, 168, 3, 132, 64),
    "reduce_a dropout": (64, 64, 4, 3, 128, 4, 132, 0),
    "reduce_b small": (64, 256, 4, 3, 0, 2, 132, 64),
    "reduce_b large": (64, 256, 8, 3, 0, 1, 132, 64),
    "reduce_b cast": (64, 256, 8, 4, 0, 1, 132, 64),
    "reduce_b float32": (64, 128, 8, 2, 255, 1, 132, 0),
    "sum": (8, 0, 4, 3, 0, 16, 132, 0),
}
WAYS = {  # sent, reload, snake
    "reduce_a large": (True, False, True),
    "reduce_b large": (True, True, True),
    "reduce_b cast": (True, False, True),
}
H200 = Device(shared_bytes=232_448, capability=90)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_measured_device_has_the_measured_settings(kernel):
    """Bits depend on them: there every shape has a line of the table, as it was measured."""
    for shape in shapes():
        found = tuning(kernel, shape, H200)
        assert found is settings.TUNINGS[settings.case_of(kernel, shape)]
        case = settings.case_of(kernel, shape)
        assert dataclasses.astuple(found) == (*TILES[case], *WAYS.get(case, (False,) * 3))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("shared_bytes", "capability"), [(65_536, 75), (166_912, 80), (101_376, 86), (101_376, 120)]
)
def test_other_devices_get_what_fits(kernel, shared_bytes, capability):
    """Tiles may be smaller and stages fewer; all else stays."""
    device = Device(shared_bytes=shared_bytes, capability=capability)
    for shape in shapes():
        found = tuning(kernel, shape, device)
        best = settings.TUNINGS[settings.case_of(kernel, shape, device)]
        assert settings.shared_bytes(kernel, shape, found, capability) <= shared_bytes
        assert found.tokens <= best.tokens
        assert found.features <= best.features
        assert found.stages <= best.stages
        sizes = {"tokens": best.tokens, "features": best.features, "stages": best.stages}
        # Their products take operands from registers.
        ways = {"sent": False, "reload": False}
        assert dataclasses.replace(found, **sizes) == dataclasses.replace(best, **ways)
        assert found.features >= 32 or kernel == "sum", "the counters have room for no more tiles"
        assert kernel != "shrink" or found.tokens == best.tokens, "the work list says its tokens"


def test_loads_ahead_are_left_out_only_where_that_makes_room():
    """Pieces of several linears, which a program holds, on a device whose products leave room."""
    wide = Shape(num_tokens=2048, max_rank=64, width=192)
    assert tuning("expand_dx", wide).stages == 1
    ampere = Device(shared_bytes=166_912, capability=80)
    for shape, device in (
        (dataclasses.replace(wide, width=64), H200),
        (dataclasses.replace(wide, max_rank=128, width=384), H200),
        (wide, ampere),
    ):
        assert tuning("expand_dx", shape, device).stages == 2


def test_stages_go_first_then_features_then_tokens():
    shape = Shape(num_tokens=2048, max_rank=64, width=192)
    sizes = {}
    for size in range(232_448, 0, -1024):
        found = tuning("reduce_b", shape, Device(shared_bytes=size, capability=90))
        sizes.setdefault((found.tokens, found.features, found.stages))
    # Three stages of half the features take less than two of all.
    assert list(sizes)[:4] == [(64, 256, 3), (64, 256, 2), (64, 128, 3), (64, 128, 2)]
    assert list(sizes)[-1] == (16, 32, 2), "the smallest, where nothing fits"


LAYER = {
    "q, k, v": (4096, (4096, 1024, 1024), ("backward",)),
    "q, k, v of equal heads": (4096, (4096, 4096, 4096), ()),
    "o": (4096, (4096,), ("backward",)),
    "gate, up": (4096, (14336, 14336), ()),
    "gate, up of a small model": (2048, (8192, 8192), ()),
    "q, k, v of equal heads of a small model": (2048, (2048, 2048, 2048), ()),
    "down": (14336, (4096,), ("backward",)),
    "one that widens": (2048, (8192,), ()),
}


@pytest.mark.parametrize("name", LAYER)
def test_the_update_is_inside_where_that_was_faster_on_hopper_alone(name):
    features_in, features_out, ways = LAYER[name]
    assert settings.inside_ways(features_in, features_out, settings.MEASURED) == ways
    for capability in (80, 89, 100, 120):
        other = Device(shared_bytes=232_448, capability=capability)
        assert settings.inside_ways(features_in, features_out, other) == ()


def test_rows_that_sixteen_bytes_do_not_divide_have_it_elsewhere():
    assert settings.inside_ways(128, (64,), settings.MEASURED) == ("backward",)
    assert settings.inside_ways(132, (64,), settings.MEASURED) == ()
    assert settings.inside_ways(128, (60,), settings.MEASURED) == ()


def test_the_update_is_inside_unless_somebody_says_no(monkeypatch):
    monkeypatch.delenv("TLORA_UPDATE_INSIDE", raising=False)
    assert routes.update_inside() == "measured"
    monkeypatch.setenv("TLORA_UPDATE_INSIDE", "0")
    assert routes.update_inside() == "none"


def test_what_is_not_known_of_the_update_inside_is_said_once(monkeypatch, caplog):
    monkeypatch.setenv("TLORA_UPDATE_INSIDE", "non")
    assert [routes.update_inside() for _ in range(3)] == ["measured"] * 3
    assert [record.message for record in caplog.records] == [
        "TLORA_UPDATE_INSIDE=non is not known and does nothing: 0 and all are"
    ]


def test_all_products_that_can_have_the_update_inside_if_somebody_says_so(monkeypatch):
    """On Hopper, where rows are aligned."""
    monkeypatch.setenv("TLORA_UPDATE_INSIDE", "all")
    assert routes.update_inside() == "all"
    every = functools.partial(settings.inside_ways, every=True)
    for features_in, features_out, _ in LAYER.values():
        assert every(features_in, features_out, settings.MEASURED) == ("forward", "backward")
    assert every(132, (64,), settings.MEASURED) == ()
    assert every(128, (64,), Device(shared_bytes=232_448, capability=100)) == ()
