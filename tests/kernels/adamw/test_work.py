"""The work list names every parameter of every job once, and nothing else."""

import pytest
import torch
from support.adamw import Job, Problem

from tlora.kernels.adamw.work import (
    ALIGNED,
    COUNT,
    EXP_AVG,
    EXP_AVG_SQ,
    GRAD,
    SLOT,
    VALUE,
    Rows,
    Span,
    Work,
    build_table,
    chunks_of,
)

WIDTHS = (48, 7, 20)
JOBS = [Job((5, 5, 5), seed=1), Job((1, 0, 1), seed=2), Job((16, 9, 8), seed=3)]


def covered(problem: Problem, column: int, slot: int) -> list[int]:
    """Addresses of the slot's parameters in this column's tensor, sorted."""
    rows = [row for row in problem.work.table.tolist() if row[SLOT] == slot]
    return sorted(row[column] + 4 * i for row in rows for i in range(row[COUNT]))


@pytest.mark.parametrize("chunk", [4, 64, 8192])
def test_every_parameter_of_a_job_is_in_its_span_once(chunk: int) -> None:
    """In all four tensors; a list without one of its chunks covers less."""
    problem = Problem(WIDTHS, JOBS, "cpu", chunk=chunk)
    for slot, span in enumerate(problem.work.spans):
        inside = problem.work.table[span.first : span.first + span.size]
        assert (inside[:, SLOT] == slot).all()
        assert (problem.work.table[:, SLOT] == slot).sum() == span.size
        for index, column in enumerate((VALUE, GRAD, EXP_AVG, EXP_AVG_SQ)):
            wanted = sorted(
                views[index].data_ptr() + 4 * i
                for views in problem.views(slot)
                for i in range(views[index].numel())
            )
            assert covered(problem, column, slot) == wanted
    assert (problem.work.table[:, COUNT] > 0).all()
    assert (problem.work.table[:, COUNT] <= chunk).all()


def test_a_jobs_chunks_do_not_depend_on_its_neighbours() -> None:
    """Counts and alignment of a job alone are those it has among others, at other addresses."""
    columns = [COUNT, ALIGNED]
    alone = Problem(WIDTHS, JOBS[2:], "cpu", chunk=64).work.table[:, columns]
    work = Problem(WIDTHS, JOBS, "cpu", chunk=64).work
    span = work.spans[2]
    assert torch.equal(alone, work.table[span.first : span.first + span.size, columns])
    # Rows of seven values are never said to be aligned, though some of them are.
    widths = [7, 48]
    for aligned, width in zip((0, 1), widths, strict=True):
        problem = Problem([width], [Job((4,), seed=1)] * 2, "cpu", chunk=64)
        assert set(problem.work.table[:, ALIGNED].tolist()) == {aligned}


def test_the_part_around_some_slots_is_no_longer_than_it_must_be() -> None:
    """A job alone launches its own chunks; two with one between them, all three."""
    table = torch.zeros(9, 8, dtype=torch.int64)
    work = Work(table, (Span(0, 2), Span(2, 3), Span(5, 4)), torch.zeros(3, 2))
    assert work.around([1]) == Span(2, 3)
    assert work.around([2, 0]) == Span(0, 9)


def test_nobody_has_no_list() -> None:
    """No jobs, and jobs without rows, are an empty table."""
    table, spans = build_table([])
    assert table.shape == (0, 8) and spans == ()
    matrix = tuple(torch.zeros(2, 8) for _ in range(4))
    table, spans = build_table([[], [Rows(matrix, 0, 0)]])
    assert len(table) == 0 and spans == (Span(0, 0), Span(0, 0))


def test_a_chunk_that_breaks_alignment_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        chunks_of([], chunk=10)
