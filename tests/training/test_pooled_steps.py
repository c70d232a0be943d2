"""The steps of all due jobs by one pass over the pool, against each job by itself: on a GPU, or on
the CPU in Triton's interpreter, in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tlora.kernels.adamw import chunks_of
from tlora.kernels.adamw.work import COPY, SLOT
from tlora.model.adapters import LoraPair
from tlora.model.job_rows import JobRows
from tlora.model.pool import GroupPool
from tlora.model.targets import Target
from tlora.training import optimiser
from tlora.training.optimiser import AdamW, DueStep, PooledRows, step_jobs

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter cuts bfloat16 off instead of rounding it.
HALF = torch.bfloat16 if ON_GPU else torch.float16
runs_kernels = pytest.mark.skipif(
    not (ON_GPU or INTERPRETED), reason="run by test_in_the_interpreter, in a process of its own"
)
TARGETS = [
    [Target("q", 24, 16, False), Target("k", 24, 7, False)],
    [Target("down", 40, 24, False)],
]
DUE = {
    "one": DueStep("one", AdamW(weight_decay=0.1), 1e-2, 3, 0.5),
    "two": DueStep("two", AdamW(beta1=0.8, epsilon=1e-6), 3e-3, 1, None),
    "three": DueStep("three", AdamW(), 1e-3, 9, 1e6),
}


@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="the kernels run in this process")
def test_in_the_interpreter():
    """All tests of this file, where there is no GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


class Pools:
    """The pools of a super-model without its model."""

    def __init__(self, copies=torch.float32):
        self.device, self.places, self.jobs = DEVICE, 0, []
        self.pools = [GroupPool(targets, 8, DEVICE, copies) for targets in TARGETS]

    def attach(self, job, rank, seed, without=()):
        generator = torch.Generator().manual_seed(seed)
        weights = {
            target.path: LoraPair(
                a=torch.randn(rank, target.in_features, generator=generator),
                b=torch.randn(target.out_features, rank, generator=generator),
            )
            for targets in TARGETS
            for target in targets
            if target.path not in without
        }
        for pool in self.pools:
            pool.attach(job, weights)
        self.jobs.append(job)
        self.places += 1

    def detach(self, job):
        for pool in self.pools:
            pool.detach(job)
        self.jobs.remove(job)
        self.places += 1

    def views(self, job):
        return dict(named for pool in self.pools for named in pool.views(job))

    def copied(self, job):
        """(copy, value) of each part of the job's rows."""
        parts = [part for pool in self.pools for part in pool.parts(job)]
        return JobRows(parts).copied

    def copies_follow(self):
        """Everybody's, and the rows of nobody."""
        return all(
            torch.equal(each.operand, each.value.to(each.operand.dtype))
            for pool in self.pools
            for each in pool.matrices
        )

    def fill_gradients(self, seed, factor=1.0):
        generator = torch.Generator().manual_seed(seed)
        for job in sorted(self.jobs):
            for rows in self.views(job).values():
                rows.grad.copy_(torch.randn(rows.grad.shape, generator=generator) * factor)


def taken(pools, due, *, pooled, monkeypatch):
    monkeypatch.setattr(optimiser, "triton_serves", lambda device: pooled)
    return step_jobs(pools, due).tolist()


def worst(ours, theirs, jobs):
    errors = [
        float((u - v).norm() / v.norm().clamp(min=1e-30))
        for job in jobs
        for rows, right in zip(ours.views(job).values(), theirs.views(job).values(), strict=True)
        for u, v in zip(rows, right, strict=True)
    ]
    return max(errors)


def test_only_newcomers_are_listed_anew(monkeypatch):
    """Who stays where it was keeps its part of the list; a list that is kept when a pool has moved
    would name memory of others. Copies move with their matrices."""
    pools, made = Pools(HALF), []
    monkeypatch.setattr(optimiser, "chunks_of", lambda rows: made.append(rows) or chunks_of(rows))
    pools.attach("one", 5, seed=1)
    pools.attach("two", 3, seed=2)
    rows = PooledRows(pools)
    rows.work()
    assert len(made) == 2
    pools.detach("one")
    pools.attach("three", 2, seed=3)
    work, slots = rows.work()
    assert len(made) == 3 and list(slots) == ["two", "three"]
    assert torch.equal(work.table, fresh_table(pools))
    before = copies_of("two", pools, work, slots)
    pools.attach("four", 40, seed=4)
    made.clear()
    work, slots = rows.work()
    assert len(made) == 3, "a pool that has grown is elsewhere"
    assert torch.equal(work.table, fresh_table(pools))
    assert not set(before) & set(copies_of("two", pools, work, slots))
    assert work.copy_dtype == HALF and PooledRows(Pools()).work()[0].copy_dtype is None


def copies_of(job, pools, work, slots):
    """Where the list says that a job's copies begin, which is where they do."""
    found = work.table[work.table[:, SLOT] == slots[job], COPY].tolist()
    assert found == [copy.data_ptr() for copy, _ in pools.copied(job)]
    return found


def fresh_table(pools):
    return PooledRows(pools).work()[0].table


@runs_kernels
def test_one_pass_equals_each_job_by_itself_while_jobs_come_and_go(monkeypatch):
    """Through a pool that grows and a row range that is claimed again; jobs that are not due keep
    their gradients; the copies that kernels read follow. Another rate shows."""
    both = [Pools(HALF), Pools()]
    ours, theirs = (PooledRows(each) for each in both)
    for each in both:
        each.attach("one", 5, seed=1)
        each.attach("two", 3, seed=2, without=("k",))
    lists = [ours.work()[0]]
    for number, change in enumerate(("", "grow", "detach")):
        for each in both:
            if change == "grow":
                each.attach("three", 9, seed=3)
            elif change == "detach":
                each.detach("one")
                each.attach("one", 2, seed=4, without=("down",))
            each.fill_gradients(number)
        due = [DUE[job] for job in ("two", "three", "one") if job in both[0].jobs]
        if change == "grow":
            due = due[:2]
        found = taken(ours, due, pooled=True, monkeypatch=monkeypatch)
        right = taken(theirs, due, pooled=False, monkeypatch=monkeypatch)
        assert found == pytest.approx(right, rel=1e-6)
        assert worst(*both, both[0].jobs) < 1e-6
        assert both[0].copies_follow()
        lists.append(ours.work()[0])
    assert lists[0] is lists[1] and len(set(map(id, lists))) == 3
    due = DueStep("two", AdamW(), 1.01e-2, 2, None)
    for each in both:
        each.fill_gradients(9)
    taken(ours, [due], pooled=True, monkeypatch=monkeypatch)
    taken(theirs, [DueStep("two", AdamW(), 1e-2, 2, None)], pooled=False, monkeypatch=monkeypatch)
    assert worst(*both, ["two"]) > 1e-5


@runs_kernels
@pytest.mark.parametrize("pooled", [False, True])
def test_a_norm_that_is_no_number_keeps_the_weights(pooled, monkeypatch):
    """Either way: the gradients are gone, weights and moments stay, the neighbour has stepped."""
    pools = Pools(HALF if pooled else torch.float32)
    pools.attach("one", 5, seed=1)
    pools.attach("two", 3, seed=2)
    pools.fill_gradients(1)
    pools.views("one")["q.lora_B"].grad[0, 3] = float("nan")
    before = {
        job: {name: [t.clone() for t in rows] for name, rows in pools.views(job).items()}
        for job in pools.jobs
    }
    rows, due = PooledRows(pools), [DUE["one"], DUE["two"]]
    norms = taken(rows, due, pooled=pooled, monkeypatch=monkeypatch)
    assert norms[0] != norms[0] and 0 < norms[1] < float("inf")
    for name, (value, grad, exp_avg, exp_avg_sq) in pools.views("one").items():
        old = before["one"][name]
        assert torch.equal(value, old[0]) and not grad.any()
        assert not exp_avg.any() and not exp_avg_sq.any()
    for name, rows in pools.views("two").items():
        assert not torch.equal(rows.value, before["two"][name][0]) and not rows.grad.any()
    assert pools.copies_follow()


@runs_kernels
def test_a_step_renews_the_copies_of_who_steps_and_no_others(monkeypatch):
    """A copy that is out of date shows it: the neighbour's stays so, the job's own is right."""
    pools = Pools(HALF)
    pools.attach("one", 5, seed=1)
    pools.attach("two", 3, seed=2)
    pools.fill_gradients(1)
    for copy, _ in (*pools.copied("one"), *pools.copied("two")):
        copy.fill_(0.25)
    taken(PooledRows(pools), [DUE["one"]], pooled=True, monkeypatch=monkeypatch)
    assert all(torch.equal(copy, value.to(HALF)) for copy, value in pools.copied("one"))
    assert all((copy == 0.25).all() for copy, _ in pools.copied("two"))


@runs_kernels
def test_weights_that_grow_beyond_numbers_reach_no_copy(monkeypatch):
    """By a rate that nothing holds: the job hears NaN, its copies are zeros, and the neighbour
    steps as it would without it."""
    pools, healthy = Pools(HALF), Pools(HALF)
    for each in (pools, healthy):
        each.attach("one", 5, seed=1)
        each.attach("two", 3, seed=2)
        each.fill_gradients(1)
    due = [replace(DUE["one"], learning_rate=1e300), DUE["two"]]
    norms = taken(PooledRows(pools), due, pooled=True, monkeypatch=monkeypatch)
    right = taken(PooledRows(healthy), [DUE["two"]], pooled=True, monkeypatch=monkeypatch)
    assert norms[0] != norms[0] and norms[1] == right[0]
    assert not any(copy.any() for copy, _ in pools.copied("one"))
    for (copy, value), (other, _) in zip(pools.copied("two"), healthy.copied("two"), strict=True):
        assert torch.equal(copy, value.to(HALF)) and torch.equal(copy, other)
