"""The work list names every parameter of every job once, and nothing else."""

import pytest
import torch
from support.adamw import Job, Problem

from tlora.kernels.adamw.work import (
    ALIGNED,
    COPY,
    COUNT,
    EXP_AVG,
    EXP_AVG_SQ,
    GRAD,
    SLOT,
    VALUE,
    Rows,
    Span,
    Work,
    chunks_of,
    one_dtype,
)

WIDTHS = (48, 7, 20)
JOBS = [Job((5, 5, 5), seed=1), Job((1, 0, 1), seed=2), Job((16, 9, 8), seed=3)]


def covered(problem: Problem, column: int, slot: int, num_bytes: int = 4) -> list[int]:
    """Addresses of the slot's parameters in this column's tensor, sorted."""
    rows = [row for row in problem.work.table.tolist() if row[SLOT] == slot and row[column]]
    return sorted(row[column] + num_bytes * i for row in rows for i in range(row[COUNT]))


@pytest.mark.parametrize("chunk", [4, 64, 8192])
def test_every_parameter_of_a_job_is_in_its_span_once(chunk: int) -> None:
    """In all four tensors, and in the copies of those that have one; a list without one of its
    chunks covers less."""
    copies = [torch.bfloat16, torch.bfloat16, None]
    problem = Problem(WIDTHS, JOBS, "cpu", chunk=chunk, copies=copies)
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
        wanted = sorted(
            copy.data_ptr() + 2 * i for _, copy in problem.copied(slot) for i in range(copy.numel())
        )
        assert covered(problem, COPY, slot, num_bytes=2) == wanted
    table = problem.work.table
    assert (table[table[:, ALIGNED] == 1, COPY] % 8 == 0).all() and not (table[:, COPY] == 0).all()
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
    work = Work.of([], "cpu")
    assert work.table.shape == (0, 8) and work.spans == ()
    matrix = tuple(torch.zeros(2, 8) for _ in range(4))
    work = Work.of([[], [Rows(matrix, 0, 0)]], "cpu")
    assert len(work.table) == 0 and work.spans == (Span(0, 0), Span(0, 0))


def test_copies_are_of_one_number_format() -> None:
    """A kernel writes one; a matrix without a copy has no say in it."""
    copies = [torch.zeros(1, dtype=torch.float16), None, torch.zeros(2, dtype=torch.float16)]
    assert one_dtype(copies) == torch.float16 and one_dtype([None]) is None
    with pytest.raises(ValueError, match=r"torch\.bfloat16 and torch\.float16"):
        one_dtype([*copies, torch.zeros(1, dtype=torch.bfloat16)])


def test_a_chunk_that_breaks_alignment_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        chunks_of([], chunk=10)
