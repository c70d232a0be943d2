"""The pooled optimiser on a CUDA device, at the sizes of an 8B model."""

import pytest
import torch
from support.adamw import Job, Problem, Torch, worst_error

from tlora.kernels.adamw.work import CHUNK

triton_steps = pytest.importorskip("tlora.kernels.adamw.triton_steps", reason="needs Triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
# q, k and down of a layer of 8B, and a width whose rows are not aligned.
WIDTHS = (4096, 1024, 14336, 1031)
JOBS = [
    Job((64, 64, 64, 64), seed=1, max_norm=0.5),
    Job((1, 0, 1, 1), seed=2, decay=0.1, rate=3e-2),
    Job((256, 33, 256, 97), seed=3, betas=(0.4, 0.95), epsilon=1e-6, decay=0.01, max_norm=1e6),
    Job((8, 16, 5, 3), seed=4, betas=(0.95, 0.99), max_norm=10.0),
]
# Relative. Values are rounded once or twice a step, norms sum up to five million squares; 1 % of a
# rate is 1e-4 and more.
LIMIT = 2e-6


COPIES = (torch.bfloat16, torch.bfloat16, None, torch.bfloat16)
"""One matrix has none."""


def new_problem(jobs: list[Job] = JOBS) -> Problem:
    return Problem(WIDTHS, jobs, "cuda", chunk=CHUNK, copies=COPIES)


def launched(problem: Problem, numbers: dict[int, int]) -> torch.Tensor:
    """Fill the gradients of these slots' steps and launch them."""
    for slot, number in numbers.items():
        problem.fill_gradients(slot, number)
    orders = [problem.jobs[slot].order(slot, number) for slot, number in numbers.items()]
    return triton_steps.step(problem.work, orders)


def test_steps_equal_torchs_and_touch_nobody_else() -> None:
    """Four jobs over three rounds, some of them not due: weights, moments and norms are those of
    float64, copies are the weights as torch rounds them, every other row keeps its bits, and a rate
    that is 1 % off is refused."""
    problem, theirs = new_problem(), [Torch(job, WIDTHS) for job in JOBS]
    for numbers in ({2: 1, 0: 1}, {3: 1, 0: 2}, {0: 3, 1: 1, 2: 2, 3: 2}):
        before = problem.copy()
        norms = launched(problem, numbers)
        right = [theirs[slot].step(number) for slot, number in numbers.items()]
        assert norms.tolist() == pytest.approx(right, rel=LIMIT)
        for slot in numbers:
            theirs[slot].finish()
            assert worst_error(problem, slot, theirs[slot]) < LIMIT, (slot, numbers)
            assert not any(grad.any() for _, grad, _, _ in problem.views(slot))
            assert problem.copies_follow(slot)
        changed = problem.changed_rows(before)
        for rows, owned in zip(changed, problem.owned_rows(list(numbers)), strict=True):
            assert not rows[~owned].any()
    off = Torch(Job((1, 0, 1, 1), seed=2, decay=0.1, rate=3.03e-2), WIDTHS)
    off.step(1)
    off.finish()
    assert worst_error(problem, 1, off) > 10 * LIMIT


def test_a_gradient_that_is_no_number_changes_its_own_job_only() -> None:
    """In the last chunk of a job with many."""
    problem, healthy = new_problem(), new_problem()
    everyone = dict.fromkeys(range(len(JOBS)), 1)
    launched(healthy, everyone)
    problem.fill_gradients(2, 1)
    gradients = [views[1] for views in problem.views(2)]
    gradients[-1][-1, -1] = float("inf")
    before = problem.copy()
    for slot in (0, 1, 3):
        problem.fill_gradients(slot, 1)
    orders = [job.order(slot, 1) for slot, job in enumerate(JOBS)]
    norms = triton_steps.step(problem.work, orders).tolist()
    assert norms[2] == float("inf") and all(norm < 1e9 for norm in norms[:2] + norms[3:])
    changed = problem.changed_rows(before)
    for i, (rows, owned) in enumerate(zip(changed, problem.owned_rows([2]), strict=True)):
        assert rows[owned].any() == (i < 4 * len(WIDTHS) and i % 4 == 1)
    for slot in (0, 1, 3):
        for ours, theirs in zip(problem.views(slot), healthy.views(slot), strict=True):
            assert all(torch.equal(u, v) for u, v in zip(ours, theirs, strict=True))
        assert problem.copies_follow(slot)


@pytest.mark.parametrize("matrix", [0, 2], ids=["aligned", "odd"])
@pytest.mark.parametrize("weight", [3.4e38, -3.4e38, float("inf"), float("nan")])
def test_a_weight_that_a_copy_does_not_hold_is_zero_there_and_fails_its_job(
    weight: float, matrix: int
) -> None:
    """In the last chunk of a job with many: its norm is NaN, the rest of its copies follow, and the
    others have the bits of a run without it. One that bfloat16 holds is copied."""
    problem, healthy = new_problem(), new_problem()
    for each, value in ((problem, weight), (healthy, 3.3e38)):
        each.copied(2)[matrix][0][-1, -1] = value
    everyone = dict.fromkeys(range(len(JOBS)), 1)
    norms, right = launched(problem, everyone).tolist(), launched(healthy, everyone).tolist()
    assert norms[2] != norms[2] and right[2] < float("inf")
    assert norms[:2] + norms[3:] == right[:2] + right[3:]
    assert healthy.copies_follow(2) and healthy.copied(2)[matrix][1][-1, -1] > 3.2e38
    for index, (ours, theirs) in enumerate(zip(problem.copied(2), healthy.copied(2), strict=True)):
        wrong = (ours[1] != theirs[1]).nonzero().tolist()
        last = [size - 1 for size in ours[1].shape]
        assert ours[1].isfinite().all() and wrong == ([last] if index == matrix else [])
    assert problem.copied(2)[matrix][1][-1, -1] == 0
    for slot in (0, 1, 3):
        for ours, theirs in zip(problem.views(slot), healthy.views(slot), strict=True):
            assert all(torch.equal(u, v) for u, v in zip(ours, theirs, strict=True))
        assert problem.copies_follow(slot)


def test_same_bits_twice_and_with_other_neighbours() -> None:
    """A job at other rows, alone or due with others; rows of odd width begin anywhere."""
    mine, first = JOBS[2], None
    for jobs in ([mine], [mine], [JOBS[3], mine], [JOBS[1], JOBS[0], mine]):
        problem = new_problem(jobs)
        slot = len(jobs) - 1
        norms = launched(problem, dict.fromkeys(range(len(jobs)), 1))
        found = [norms[slot], *(t for views in problem.views(slot) for t in views)]
        found += [copy for _, copy in problem.copied(slot)]
        first = first or found
        assert all(torch.equal(u, v) for u, v in zip(first, found, strict=True))


def test_a_step_waits_for_nothing() -> None:
    """Launching makes no call that synchronises; reading the norms does, which shows that one would
    be seen."""
    problem = new_problem()
    for slot in range(len(JOBS)):
        problem.fill_gradients(slot, 1)
    launched(problem, {0: 1})  # compiled by now
    problem.fill_gradients(0, 2)
    orders = [job.order(slot, 2) for slot, job in enumerate(JOBS)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        norms = triton_steps.step(problem.work, orders)
        with pytest.raises(RuntimeError, match="synchroniz"):
            norms.tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(norm > 0 for norm in norms.tolist())
