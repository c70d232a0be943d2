"""The public entry as autograd, `torch.compile` and checkpointing see it."""

from collections.abc import Callable, Iterator

import pytest
import torch
from support.comparing import agrees, same_bits
from support.multi_lora import (
    S_WIDTH,
    Case,
    Job,
    Results,
    expected,
    make_case,
    mismatches,
    pieces,
    run,
)
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from tlora.kernels.multi_lora import multi_lora
from tlora.kernels.multi_lora.routes import table_route

JOBS = [Job(9, (3, 0), 0.5, 0.2), Job(0, (2, 2)), Job(6, (1, 5), 2.0), Job(1, (4, 4), 1.0, 0.1)]
OTHER_JOBS = [Job(4, (7, 1)), Job(12, (0, 2), dropout=0.5)]
OPTIONS = {"in_features": 8, "out_features": (6, 5), "padding": 2}


def simple_case(**options: object) -> Case:
    return make_case(JOBS, **{**OPTIONS, **options})


def call(case: Case, **changes: object) -> tuple[torch.Tensor, ...]:
    """The entry with a case's arguments, some of them changed."""
    table, scales = case.table()
    keywords = {
        "a": case.a.clone().requires_grad_(True),
        "b": case.b,
        "grad_a": case.grad_a,
        "grad_b": case.grad_b,
        "route": table_route(table, scales, S_WIDTH),
        "rows": case.rows,
        "linears": torch.tensor(case.linears),
    }
    arguments = {"x": case.x, "weights": case.weights, "biases": case.biases, **keywords}
    return multi_lora(**{**arguments, **changes})


# The entry refuses what does not fit.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda case: {"x": case.x[:, :-1]}, r"x must be \[tokens, 8\], got \[18, 7\]"),
        (lambda case: {"x": case.x[None]}, r"x must be \[tokens, 8\], got \[1, 18, 8\]"),
        (lambda case: {"biases": case.biases[:1]}, "2 weights need as many biases"),
        (lambda case: {"linears": torch.tensor([1, 2, 3])}, "2 weights need as many biases"),
        (lambda case: {"b": case.b[:1]}, "2 weights need as many biases"),
        (
            lambda case: {"route": table_route(case.table()[0][:, :-2], case.table()[1], S_WIDTH)},
            "another number of linears than 2",
        ),
        (lambda case: {"rows": case.rows[1:]}, "rows has 17 entries for 18 tokens"),
        (lambda case: {"rows": case.rows.long()}, "rows must be int32 and linears int64"),
        (lambda case: {"linears": torch.tensor([0, 1]).int()}, "rows must be int32 and linears"),
        (lambda case: {"grad_a": case.grad_a[1:]}, "grad_a and grad_b must have the shapes"),
        (lambda case: {"grad_b": case.grad_b[::-1]}, "grad_a and grad_b must have the shapes"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    changes: Callable[[Case], dict[str, object]], message: str
) -> None:
    """Before anything is computed, with what was expected and what came."""
    case = simple_case()
    with pytest.raises(ValueError, match=message):
        call(case, **changes(case))


# Autograd.


def test_two_forwards_may_come_before_their_backwards() -> None:
    """Both are added, though the first changes what the second will add to."""
    case = simple_case()
    grad_a, grad_b = case.grad_a.clone(), [grad.clone() for grad in case.grad_b]
    first, second = (call(case, grad_a=grad_a, grad_b=grad_b) for _ in range(2))
    torch.autograd.backward(second, case.dy)
    torch.autograd.backward(first, case.dy)
    once = run(case)
    for twice, one, before in [
        (grad_a, once.grad_a, case.grad_a),
        *zip(grad_b, once.grad_b, case.grad_b, strict=True),
    ]:
        assert agrees(twice.double(), 2 * one.double() - before, tolerance=2e-6)


def test_an_output_that_nobody_uses_gives_no_gradient() -> None:
    """Its dy is zero; the other linears' gradients are as ever."""
    case = simple_case()
    grad_a, grad_b = case.grad_a.clone(), [grad.clone() for grad in case.grad_b]
    x = case.x.clone().requires_grad_(True)
    y = call(case, x=x, grad_a=grad_a, grad_b=grad_b)
    y[1].backward(case.dy[1])
    case = case.but(dy=[torch.zeros_like(case.dy[0]), case.dy[1]])
    found = Results([y_l.detach() for y_l in y], x.grad, grad_a, grad_b)
    assert mismatches(found, expected(case), case) == []
    assert same_bits(grad_b[0], case.grad_b[0])


def test_gradients_of_any_layout_are_taken() -> None:
    """`sum` hands back an expanded dy, and x may be a slice or a transpose of something larger."""
    case = simple_case()
    case = case.but(
        x=torch.cat([case.x, case.x], dim=1).T.contiguous().T[:, 8:],
        dy=[torch.ones(()).expand(dy_l.shape) for dy_l in case.dy],
    )
    assert not case.x.is_contiguous()
    assert mismatches(run(case), expected(case), case) == []


def test_without_gradients_nothing_is_recorded() -> None:
    """Evaluation: outputs as in training, no graph."""
    case = simple_case()
    with torch.no_grad():
        y = call(case)
    assert not any(y_l.requires_grad for y_l in y)
    assert all(map(same_bits, y, run(case).y))


def test_a_changed_adapter_between_forward_and_backward_is_an_error() -> None:
    """A step taken in between would make gradients of neither."""
    case = simple_case()
    y = call(case)
    case.b[1].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(y, case.dy)


@pytest.mark.parametrize(("dtype", "transposed"), [(torch.float32, False), (torch.bfloat16, True)])
def test_the_operators_declare_what_they_do(dtype: torch.dtype, transposed: bool) -> None:
    """torch's own checks: which arguments change, and shapes and strides without data."""
    case = simple_case(dtype=dtype, transposed=transposed)
    # Finite pools, for torch compares what was written.
    a, b = case.a.nan_to_num(), [b_l.nan_to_num() for b_l in case.b]
    where = (*table_route(*case.table(), S_WIDTH), case.rows, torch.tensor(case.linears))
    grads = (case.grad_a, case.grad_b)
    for x in (case.x, case.x.T.contiguous().T):
        forward = (x, case.weights, case.biases, transposed, a, b, *where)
        check_operator(torch.ops.tlora.multi_lora_forward.default, forward)
        for needs_dx in (True, False):
            s = torch.zeros(len(x), S_WIDTH)
            backward = (x, case.dy, s, case.weights, transposed, a, b, *grads, *where, needs_dx)
            check_operator(torch.ops.tlora.multi_lora_backward.default, backward)


def check_operator(operator: torch._ops.OpOverload, arguments: tuple[object, ...]) -> None:
    checks = ("test_schema", "test_faketensor")
    results = torch.library.opcheck(operator, arguments, test_utils=checks)
    assert results == dict.fromkeys(checks, "SUCCESS")


# Checkpointing.


@pytest.mark.parametrize("times", [1, 3])
def test_gradients_are_added_once_under_checkpointing(times: int) -> None:
    """Forward runs twice, backward once: the bits of a run without it."""

    def checkpointed(x: torch.Tensor, *arguments: object, **keywords: object):
        return checkpoint(multi_lora, x, *arguments, use_reentrant=False, **keywords)

    case = simple_case()
    plain, found = case, case
    for _ in range(times):
        wanted, results = run(plain), run(found, entry=checkpointed)
        assert_same_bits(results, wanted, case)
        plain = plain.but(grad_a=wanted.grad_a, grad_b=wanted.grad_b)
        found = found.but(grad_a=results.grad_a, grad_b=results.grad_b)


# Compilation.


@pytest.fixture
def graphs() -> Iterator[Callable[[], int]]:
    """How many graphs dynamo has made since the test began."""
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def assert_same_bits(found: Results, wanted: Results, case: Case) -> None:
    for (name, left), (_, right) in zip(pieces(found, case), pieces(wanted, case), strict=True):
        assert same_bits(left, right), name


def compiled(backend: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    return torch.compile(multi_lora, fullgraph=True, backend=backend)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_gives_the_same_bits(
    dtype: torch.dtype, backend: str, graphs: Callable[[], int]
) -> None:
    """One whole graph; outputs, dx and pooled gradients as without compiling."""
    case = simple_case(dtype=dtype)
    assert_same_bits(run(case, entry=compiled(backend)), run(case), case)
    assert graphs() == 1


def test_new_tables_recompile_nothing(graphs: Callable[[], int]) -> None:
    """Other segments, other numbers of them, other ranks and rows, jobs that come and go: at fixed
    capacity one graph serves them all."""
    entry = compiled("aot_eager")
    case = simple_case()
    other = make_case(OTHER_JOBS, **OPTIONS, seed=1)
    # One pool that holds both sets of jobs; the second's rows lie behind the first's.
    offset_a, offsets_b = len(case.a), [len(b_l) for b_l in case.b]
    whole = case.but(
        a=torch.cat([case.a, other.a]),
        b=[torch.cat(pair) for pair in zip(case.b, other.b, strict=True)],
        grad_a=torch.cat([case.grad_a, other.grad_a]),
        grad_b=[torch.cat(pair) for pair in zip(case.grad_b, other.grad_b, strict=True)],
    )
    for j, segment in enumerate(other.segments):
        b_rows = tuple(map(sum, zip(segment.b_rows, offsets_b, strict=True)))
        other = other.but_segment(j, a_row=segment.a_row + offset_a, b_rows=b_rows)
    lists = [case.segments, other.segments, case.segments[:1], case.segments[2:], []]
    for segments in lists:
        step = whole.but(segments=segments)
        found = run(step, entry=entry, capacity=16)
        assert mismatches(found, expected(step), step) == []
    assert graphs() == 1


def test_the_count_of_graphs_can_rise(graphs: Callable[[], int]) -> None:
    """A table of another capacity is another shape: the counter sees it."""
    entry, case = compiled("aot_eager"), simple_case()
    run(case, entry=entry, capacity=16)
    run(case, entry=entry, capacity=32)
    assert graphs() == 2


def test_compiled_and_checkpointed_adds_once(graphs: Callable[[], int]) -> None:
    """Both at once, inside a graph with other operations around the linears."""

    def layer(x: torch.Tensor, *arguments: object, **keywords: object):
        y = checkpoint(multi_lora, 2 * x, *arguments, use_reentrant=False, **keywords)
        return tuple(y_l.tanh() for y_l in y)

    case = simple_case()
    entry = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, wanted = run(case, entry=entry), run(case, entry=layer)
    for (name, left), (_, right) in zip(pieces(found, case), pieces(wanted, case), strict=True):
        assert agrees(left, right), name
    assert graphs() == 1
