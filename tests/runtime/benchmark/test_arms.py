"""Arms that are compared must do the same thing."""

import copy
from dataclasses import replace
from typing import cast

import pytest
import torch

from tlora.core.job import JobSpec
from tlora.model.super_model import SuperModel
from tlora.runtime.benchmark import shapes
from tlora.runtime.benchmark.arms import (
    Counter,
    draw_adapters,
    pauses,
    train_one_at_a_time,
    train_together,
)
from tlora.runtime.benchmark.peft_arm import PeftJobs, batches_of, train_one_by_one
from tlora.runtime.benchmark.phases import Phases, clocked_phases, waits_pct
from tlora.runtime.benchmark.workload import Workload
from tlora.training import optimiser

BUDGET = 64
# Float32 rounding over three steps: 3e-6 was seen. A rate 1 % off gives 2e-3.
TOLERANCE = 3e-5


def test_all_arms_do_equal_work(plain, ours, work) -> None:
    """Tokens, sequences and optimiser steps."""
    expected = work.of(work.jobs)
    assert train_together(ours, work, work.jobs, BUDGET).done == expected
    assert train_one_at_a_time(ours, work, BUDGET).done == expected
    peft = PeftJobs(plain, draw_adapters(ours, work.jobs))
    for packed in (False, True):
        assert train_one_by_one(peft, work, packed=packed).done == expected
    assert not ours.jobs


def peft_losses(base, ours: SuperModel, job: JobSpec, rows, *, packed: bool) -> list[float]:
    return losses_of(PeftJobs(base, draw_adapters(ours, [job])), job, rows, packed=packed)


def losses_of(peft: PeftJobs, job: JobSpec, rows, *, packed: bool) -> list[float]:
    adapted = peft.start(job)
    losses = [float(adapted.step(batch, packed=packed)) for batch in batches_of(job, rows)]
    adapted.stop()
    return losses


@pytest.mark.parametrize("packed", [False, True])
def test_peft_trains_what_we_train(plain, ours, work, packed) -> None:
    """From one start on one batch three times, its losses are ours; with a rate 1 % off they are
    not."""
    first = work.jobs[1]
    rows = work.rows[first.name][: first.train.batch_size]
    assert len({len(row) for row in rows}) > 1
    job = replace(first, train=replace(first.train, max_steps=3, learning_rate=1e-2))
    counter = Counter()
    train_together(ours, Workload([job], {job.name: rows}), [job], BUDGET, counter)
    expected = counter.losses[job.name]
    base = shapes.twin(plain)
    assert expected[2] < expected[0] - 0.05
    found = peft_losses(base, ours, job, rows, packed=packed)
    assert found == pytest.approx(expected, rel=TOLERANCE)
    off = replace(job, train=replace(job.train, learning_rate=1.01e-2))
    assert peft_losses(base, ours, off, rows, packed=packed) != pytest.approx(
        expected, rel=TOLERANCE
    )


def test_peft_under_autocast_trains_the_same_float32_adapters(plain, ours, work) -> None:
    """In bfloat16 the losses are those of float32 products but for rounding, and what the adapters
    multiply is not float32 any more; a rate of half is further off than rounding."""
    job = replace(work.jobs[1], train=replace(work.jobs[1].train, max_steps=4, learning_rate=2e-3))
    rows = work.rows[job.name][: job.train.batch_size]
    peft = PeftJobs(copy.deepcopy(plain).to(torch.bfloat16), draw_adapters(ours, [job]))
    seen: set[torch.dtype] = set()

    def losses(autocast: bool, job: JobSpec = job) -> list[float]:
        peft.autocast = autocast
        adapted = peft.start(job)
        assert {parameter.dtype for parameter in adapted.parameters} == {torch.float32}
        layer = next(m for n, m in adapted.model.named_modules() if n.endswith("lora_A.default"))
        seen.clear()
        handle = layer.register_forward_hook(lambda *given: seen.add(given[2].dtype))
        found = losses_of(peft, job, rows, packed=False)
        handle.remove()
        return found

    in_float32 = losses(autocast=False)
    assert seen == {torch.float32}
    found = losses(autocast=True)
    assert seen == {torch.bfloat16}
    half = losses(True, replace(job, train=replace(job.train, learning_rate=1e-3)))
    assert found == pytest.approx(in_float32, rel=0.01)
    assert half != pytest.approx(in_float32, rel=0.01)


def test_the_base_is_as_before_after_peft(plain, ours, work) -> None:
    """No linear is wrapped, and no weight has moved."""
    base = shapes.twin(plain)
    names = [(name, type(module)) for name, module in base.named_modules()]
    before = {name: value.clone() for name, value in base.state_dict().items()}
    train_one_by_one(PeftJobs(base, draw_adapters(ours, work.jobs)), work, packed=True)
    assert [(name, type(module)) for name, module in base.named_modules()] == names
    assert all(value.equal(before[name]) for name, value in base.state_dict().items())


def test_what_peft_made_for_a_rank_starts_anew_with_every_job(plain, ours, work) -> None:
    """Made once for each rank; a job's losses are the same the second time, after another job of
    its rank. Left as that job left it, they are not."""
    first, _, other = work.jobs
    assert first.lora == other.lora
    peft = PeftJobs(plain, draw_adapters(ours, work.jobs))
    rows = work.rows[first.name]
    losses = losses_of(peft, first, rows, packed=True)
    losses_of(peft, other, work.rows[other.name], packed=True)
    assert peft.start(first) is peft.start(other) is not peft.start(work.jobs[1])
    assert losses_of(peft, first, rows, packed=True) == losses
    adapted = peft.start(first)
    adapted._load = lambda weights: None  # type: ignore[method-assign]
    assert losses_of(peft, first, rows, packed=True) == losses
    assert losses_of(peft, first, rows, packed=True) != losses


def test_adapters_are_drawn_once_and_left_as_they_were(ours, work, monkeypatch) -> None:
    """Every arm copies them: nothing is drawn again, and the second run trains from the start."""
    adapters = draw_adapters(ours, work.jobs)
    before = {name: {p: pair.a.clone() for p, pair in w.items()} for name, w in adapters.items()}
    monkeypatch.setattr(SuperModel, "new_adapter", None)
    counters = [Counter(), Counter()]
    for counter in counters:
        train_together(ours, work, work.jobs, BUDGET, counter, adapters=adapters)
    assert counters[0].losses == counters[1].losses
    train_one_at_a_time(ours, work, BUDGET, adapters=adapters)
    pauses(ours, work, BUDGET, repeats=1, adapters=adapters)
    for name, weights in adapters.items():
        for path, pair in weights.items():
            assert pair.a.equal(before[name][path]) and not pair.b.any()


def test_pauses_leave_the_model_empty(ours, work) -> None:
    """Both take time, and nobody stays attached."""
    found = pauses(ours, work, BUDGET, repeats=2)
    assert min(found.attach_seconds, found.attach_from_host_seconds, found.detach_seconds) > 0
    assert not ours.jobs


def test_phases_are_timed_and_put_back(ours, work) -> None:
    """All three are seen, they are less than the whole, and the functions are their own again."""
    before = (optimiser.step, optimiser.clip)
    with clocked_phases(ours) as phases:
        assert optimiser.step is not before[0]
        run = train_together(ours, work, work.jobs, BUDGET)
    assert (optimiser.step, optimiser.clip) == before
    assert "token_losses" not in vars(ours)
    assert all(seconds > 0 for seconds in phases.seconds.values())
    assert 0 < (phases.overhead_pct(run.seconds) or 0) < 100


def test_a_phase_inside_another_is_counted_once() -> None:
    """It belongs to the outer one; by itself it is its own."""
    loss = torch.ones(1, requires_grad=True)

    class Model:
        device = torch.device("cpu")

        def token_losses(self) -> None:
            torch.autograd.backward(loss.sum())

    model = Model()
    with clocked_phases(cast(SuperModel, model)) as phases:
        model.token_losses()
        inside = dict(phases.seconds)
        torch.autograd.backward(loss.sum())
    assert inside["forward"] > 0 and inside["backward"] == 0
    assert phases.seconds["backward"] > 0 and phases.seconds["forward"] == inside["forward"]


def test_overhead_is_the_share_of_no_phase() -> None:
    """3 of 4 seconds are accounted for; a phase that was never seen means no figure."""
    phases = Phases({"forward": 1.0, "backward": 1.5, "optimiser": 0.5})
    assert phases.overhead_pct(4.0) == 25.0
    assert Phases({"forward": 1.0, "backward": 0.0, "optimiser": 0.5}).overhead_pct(4.0) is None


def test_waits_are_what_lies_between_spans() -> None:
    """1 of 10 and then 2 of 10 milliseconds between three spans; none where they touch."""
    assert waits_pct([(0.0, 3.0), (4.0, 6.0), (8.0, 10.0)]) == 30.0
    assert waits_pct([(2.0, 3.0), (3.0, 12.0)]) == 0.0
