"""The kernels in C: bits that depend on nobody, other instructions, and what the proof refuses.
That they are right through the public entry is for test_cpu.py."""

import resource
from pathlib import Path

import pytest
import torch
from support.comparing import same_bits
from support.multi_lora import S_WIDTH, Case, Job, expected, make_case, own, pieces, run
from support.native import build, build_mutant, require_native, with_fewer_instructions

from tlora.kernels import host_products
from tlora.kernels.multi_lora import multi_lora, native, native_proof
from tlora.kernels.multi_lora.native import SOURCE, Native
from tlora.kernels.multi_lora.routes import table_route
from tlora.kernels.multi_lora.tables import Segment, new_table, write_table

pytestmark = pytest.mark.usefixtures("new_tensors_hold_nan")

JOBS = [
    Job(150, (5, 0, 33), 0.5, 0.1),
    Job(0, (3, 2, 1)),
    Job(70, (16, 8, 33), 4.0, 0.3),
    Job(129, (16, 16, 16), -1.0),
    Job(1, (1, 1, 1), 2.0),
]
WIDE = {"in_features": 300, "out_features": (64, 83, 9)}


@pytest.fixture(autouse=True)
def compiled() -> Native:
    return require_native()


# Bits.


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(threads: int) -> None:
    case = make_case(JOBS, **WIDE)
    alone = run(case)
    torch.set_num_threads(threads)
    try:
        for _ in range(5):
            pairs = zip(pieces(run(case), case), pieces(alone, case), strict=True)
            assert [name for (name, found), (_, one) in pairs if not same_bits(found, one)] == []
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("job", [0, 2, 3, 4])
def test_a_job_has_the_same_bits_alone_and_in_company(job: int) -> None:
    """Not to rounding as anywhere, but to the bit: whatever the place in the row, and the rows of
    the widest neighbour. The frozen products, which may have other bits, are left out."""
    case = without_base(make_case(JOBS, **WIDE))
    found = own(run(case), case, job=job)
    segment = case.segments[job]
    tokens = slice(segment.start, segment.stop)
    solo = case.but(
        x=case.x[tokens], dy=[dy_l[tokens] for dy_l in case.dy], rows=case.rows[tokens]
    ).but_segment(job, start=0, stop=segment.stop - segment.start)
    solo = solo.but(segments=[solo.segments[job]])
    alone = own(run(solo), solo, job=0)
    assert [name for name, value in alone.items() if not same_bits(found[name], value)] == []


def test_s_that_is_there_is_read_and_left_alone() -> None:
    """A layer that runs again in backward has it from forward."""
    case = without_base(make_case(JOBS, **WIDE))
    table, scales = case.table()
    route = table_route(table, scales, S_WIDTH)
    where = (case.x, case.a, case.b, route, case.rows, torch.tensor(case.linears))
    s = torch.zeros(len(case.x), route.s_like.shape[1])
    y, doubled = ([torch.zeros_like(dy_l) for dy_l in case.dy] for _ in range(2))
    require_native().add_forward(y, s, *where)
    given = 2 * s
    require_native().add_forward(doubled, given, *where, is_written=True)
    assert same_bits(given, 2 * s) and s.any()
    assert all(same_bits(twice, 2 * once) for twice, once in zip(doubled, y, strict=True))


def test_the_sequences_of_a_job_share_its_turned_matrices() -> None:
    """Under exact isolation each is a segment. For 2,000 of them apart it would be 4 GB, and more
    time than the products take."""
    rank, features, count = 64, 8192, 2000
    segments = [Segment(i, i + 1, 0, (rank,), (0,), scale=1.0) for i in range(count)]
    table, scales = new_table(count, 1), torch.zeros(count)
    write_table(segments, table, scales)
    x, a, b = torch.zeros(count, features), torch.ones(rank, features), [torch.ones(rank, features)]
    x[:, -1] = 1.0
    y, dx, grads = (torch.zeros_like(each) for each in (x, x, a))
    s = torch.zeros(count, rank)
    route = table_route(table, scales, rank)
    where = (route, torch.zeros(count, dtype=torch.int32), torch.tensor([0]))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, before[1]))
    try:
        require_native().add_forward([y], s, x, a, b, *where)
        require_native().add_backward(dx, x, [y], s, a, b, grads, [grads.clone()], *where)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert (s == 1.0).all() and (y == rank).all()
    assert (dx == rank * rank * features).all()


def without_base(case: Case) -> Case:
    return case.but(weights=[0 * weight for weight in case.weights], biases=[None] * 3)


# The proof.


@with_fewer_instructions
def test_it_is_right_with_fewer_instructions(flags, tmp_path, monkeypatch) -> None:
    found = Native(build(SOURCE, tmp_path, monkeypatch, *flags))
    assert native_proof.find_fault(found) is None


MUTANTS: dict[str, tuple[str, str]] = {
    "scale": (".scale = g->scales[i]", ".scale = 1.01f * g->scales[i]"),
    "another's scale": (".scale = g->scales[i]", ".scale = g->scales[0]"),
    "keep": ("1.0 / (1.0 - own", "1.0 / (1.01 - own"),
    "threshold": (">= own->threshold ?", "> own->threshold + (1u << 25) ?"),
    "key of the linear": ("mix(own->key ^ mix(", "mix(own->key + mix("),
    "place of the token": ("g->places[start + t]", "g->places[t]"),
    "feature of a tile": ("w->factors + feature", "w->factors"),
    "terms of a tile": ("w->terms + feature;", "w->terms;"),
    "mix": ("0x846CA68Bu", "0x846CA68Du"),
    "a longer sum is written over": ("int adds = add || k > 0;", "int adds = add;"),
    "only the first block of a sum": ("k < depth; k += DEPTH", "k < least(depth, 1); k += DEPTH"),
    "row of B": (
        "dy + own->start * out + first, out, 0, grad + row_of",
        "dy + own->start * out + first, out, 0, grad + 1 * out + row_of",
    ),
    "dX of one linear": ("        ds += rank;\n        a += rank * g->in;", "        ds += rank;"),
    "the rest of the columns": ("? from[k * stride + n]", "? from[k * stride]"),
    "a padded rest": ("value = found[m * LANES + n]", "value = found[m * LANES]"),
    "dS without the last block": (
        "i < w.num_blocks; i++) {\n                const",
        "i < w.num_blocks - 1; i++) {\n                const",
    ),
    "dA without its scale": (
        "g->in,\n                    own->scale, 1);\n            continue",
        "g->in,\n                    1, 1);\n            continue",
    ),
    "dA of dropped inputs": (
        "x + t * g->in, g->in,\n                     kept",
        "x, g->in,\n                     kept",
    ),
    "matrices of another job": ("last >= 0 && has_matrices_of", "last >= 0 || has_matrices_of"),
    "half a square turned": (
        "first < columns; first += LANES",
        "first < columns; first += 2 * LANES",
    ),
    "S of a dropped tile": ("g->s_width, 1, f > 0);", "g->s_width, 1, 0);"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_the_proof_refuses_what_is_slightly_wrong(name: str, tmp_path, monkeypatch) -> None:
    broken = Native(build_mutant(SOURCE, *MUTANTS[name], tmp_path, monkeypatch))
    assert native_proof.find_fault(broken) is not None


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_proof_is_the_same_whatever_torch_makes_by_default(default: torch.dtype) -> None:
    """It runs at a user's first step: numbers of half the size would be written past their end."""

    class Looking(Native):
        def add_forward(self, y, s, x, *others, **more) -> None:
            assert {each.dtype for each in (*y, s, x)} == {torch.float32}
            super().add_forward(y, s, x, *others, **more)

    found = require_native()
    looking = object.__new__(Looking)
    looking.__dict__.update(found.__dict__)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert native_proof.find_fault(looking) is None
    finally:
        torch.set_default_dtype(before)


# Where it serves.


def values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(2, 2, dtype=dtype)


def test_it_serves_float32_alone() -> None:
    assert native.serving(values(), values()) is native._native()
    assert native.serving(values(torch.bfloat16), values()) is None
    assert native.serving(values(torch.float64), values(torch.float64)) is None
    assert native.serving(values().to("meta"), values()) is None
    assert native.serving(values(), values(), values(torch.bfloat16)) is None


def test_outputs_in_half_precision_are_not_written_as_float32(monkeypatch) -> None:
    """As torch.autocast makes them of float32: half the bytes."""
    monkeypatch.setattr(host_products, "_prefers_onednn", lambda: False)
    case, found = make_case(JOBS, **WIDE), []

    def forward_alone(x, *args, **more) -> tuple[torch.Tensor, ...]:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found.extend(multi_lora(x, *args, **more))
        return tuple(x.new_zeros(y.shape, requires_grad=True) for y in found)

    run(case, entry=forward_alone)
    for y, wanted in zip(found, expected(case).y, strict=True):
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.double(), wanted, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("change", ["tokens", "width"])
def test_a_table_that_leads_outside_is_refused(change: str) -> None:
    """Written to, memory of others would be in ruins."""
    case = make_case(JOBS, **WIDE)
    table, scales = case.table()
    route = table_route(table, scales, 16 if change == "width" else S_WIDTH)
    x = case.x[:-40] if change == "tokens" else case.x
    s = torch.zeros(len(x), route.s_like.shape[1])
    y = [torch.zeros(len(x), out) for out in WIDE["out_features"]]
    with pytest.raises(ValueError, match="a segment is longer"):
        require_native().add_forward(
            y, s, x, case.a, case.b, route, case.rows, torch.tensor(case.linears)
        )
