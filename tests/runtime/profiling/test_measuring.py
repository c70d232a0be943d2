"""Measuring with the demo's base: what runs, what is left out, and how the time is kept."""

import numpy as np
import pytest
import torch

from tlora.model.super_model import SuperModel
from tlora.runtime.benchmark import shapes
from tlora.runtime.profiling.grid import BARE, EIGHT, SMALL, Plan
from tlora.runtime.profiling.profiling import measure, point_of, weights_bytes
from tlora.runtime.profiling.rig import NotMeasured, Rig, Visit
from tlora.training.engine import Engine

CPU = torch.device("cpu")
RANKS = (2, 4, 1, 2, 2, 4, 4, 2)
PLANS = [
    Plan(64, (32, 32), SMALL, heldout=False),
    Plan(128, (32, 32, 32, 20), EIGHT, heldout=True),
    Plan(64, (64,), BARE, heldout=False),
]


@pytest.fixture(scope="module")
def rig() -> Rig:
    model = shapes.load(shapes.look_at("demo", "auto", CPU), CPU)
    return Rig(SuperModel(model), ranks=RANKS, weights_bytes=weights_bytes(model), reserved_rank=64)


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(0))


def run(rig: Rig, generator: np.random.Generator, **options: float):
    asked = {"seconds": 60.0, "repeats": 2, **options}
    said: list[str] = []
    return measure(rig, PLANS, generator=generator, say=said.append, **asked)  # type: ignore[arg-type]


def test_a_nano_batch_runs_as_it_was_planned(rig: Rig, monkeypatch) -> None:
    """Its rows, its tokens by job, and one step of each job that was in it."""
    seen = []
    original = Engine.run_nano_batch

    def watched(engine: Engine):
        seen.append(original(engine))
        return seen[-1]

    monkeypatch.setattr(Engine, "run_nano_batch", watched)
    plan = PLANS[1]
    rig.visit(plan)
    first, *others = seen
    shape = rig.shape_of(plan)
    assert first.rows == shape.rows == 128
    assert sorted(first.tokens.values()) == sorted(each.tokens for each in shape.segments)
    assert shape.squares == 3 * 32**2 + 20**2
    assert sum(len(outcome.steps) for outcome in others) == len(shape.segments) == 4
    assert not rig.engine.has_work()


def test_a_nano_batch_that_is_nearly_empty_has_its_rows_too(rig: Rig, monkeypatch) -> None:
    """In a run it would be padded to fewer."""
    rows = []
    original = Engine.run_nano_batch

    def watched(engine: Engine):
        outcome = original(engine)
        rows.append(outcome.rows)
        return outcome

    monkeypatch.setattr(Engine, "run_nano_batch", watched)
    plan = Plan(512, (40,), SMALL, heldout=False)
    rig.visit(plan)
    assert rows[0] == rig.shape_of(plan).rows == 512


def test_the_bare_job_is_nearly_the_frozen_backbone(rig: Rig) -> None:
    """It adapts one linear out of all."""
    (segment,) = rig.shape_of(PLANS[2]).segments
    assert segment.rank == 1 and 0 < segment.coverage < 0.1
    assert rig.parameters_of(PLANS[2]) < 0.1 * rig.parameters_per_rank


def test_every_plan_is_measured_as_often_as_asked(rig: Rig, generator) -> None:
    """After a visit that warms it up."""
    visits, skipped = run(rig, generator, repeats=3)
    assert list(visits) == PLANS and skipped == []
    assert [len(seen.visits) for seen in visits.values()] == [3, 3, 3]
    assert all(seen.warm_up for seen in visits.values())


def test_memory_that_graphs_held_is_tried_again(rig: Rig, generator, monkeypatch) -> None:
    """The engine gives it back when it runs out; what fails twice does not fit."""
    failures = {PLANS[0]: 1, PLANS[1]: 2}

    def visit(plan: Plan, **options: object) -> Visit:
        if failures.get(plan):
            failures[plan] -= 1
            raise NotMeasured("out of memory")
        return Visit(0.01, 0.001, None)

    monkeypatch.setattr(rig, "visit", visit)
    visits, skipped = run(rig, generator)
    assert set(visits) == {PLANS[0], PLANS[2]}
    assert [each.rows for each in skipped] == [PLANS[1].rows]


def test_what_ran_before_a_graph_was_captured_counts_for_memory_alone(
    rig: Rig, generator, monkeypatch
) -> None:
    """A replay takes less time and allocates nothing that is counted."""
    looks: list[Plan] = []

    def visit(plan: Plan, **options: object) -> Visit:
        looks.append(plan)
        captured = looks.count(plan) > 2
        monkeypatch.setattr(type(rig.model), "settled", captured)
        return Visit(0.01 if captured else 1.0, 0.001, 8 if captured else 800)

    monkeypatch.setattr(rig, "visit", visit)
    visits, _ = run(rig, generator)
    for plan in PLANS:
        point = point_of(rig, plan, visits[plan])
        assert (point.seconds, point.peak_bytes, point.repeats) == (0.01, 800, 2)


def test_a_nano_batch_that_does_not_fit_is_left_out_and_the_rest_goes_on(
    rig: Rig, generator, monkeypatch
) -> None:
    """Out of memory in the engine: the plan is named with its reason, the jobs are all back."""
    original = SuperModel.token_losses

    def full(model: SuperModel, batch):
        if batch.input_ids.numel() > 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return original(model, batch)

    monkeypatch.setattr(SuperModel, "token_losses", full)
    visits, skipped = run(rig, generator)
    assert set(visits) == {PLANS[0], PLANS[2]}
    assert [(each.rows, each.reason) for each in skipped] == [(128, "out of memory")]
    assert skipped[0].ranks == RANKS
    assert len(rig.engine.jobs) == len(RANKS) + 1 and not rig.engine.has_work()
    rig.engine.check_integrity()
    with pytest.raises(NotMeasured, match=r"^out of memory$"):
        rig.visit(PLANS[1])


def test_what_there_is_no_time_for_is_said(rig: Rig, generator, monkeypatch) -> None:
    """A clock that runs out after the second look."""
    ticks = iter([0.0, 0.0, 1.0, *[100.0] * 2, *[200.0] * 50])
    monkeypatch.setattr("tlora.runtime.profiling.profiling.time.monotonic", lambda: next(ticks))
    visits, skipped = run(rig, generator, seconds=10.0)
    assert visits == {}
    assert sorted(each.reason for each in skipped) == [
        "no time left to measure it",
        "no time left to measure it",
        "no time left to warm it up",
    ]


def test_plans_take_turns_in_an_order_that_changes(rig: Rig, generator, monkeypatch) -> None:
    """So that a machine that gets slower does so for all alike."""
    order: list[int] = []

    def visit(plan: Plan, **options: object) -> Visit:
        order.append(PLANS.index(plan))
        return Visit(0.01, 0.001, None)

    monkeypatch.setattr(rig, "visit", visit)
    run(rig, generator, repeats=5)
    rounds = [tuple(order[start : start + 3]) for start in range(0, len(order), 3)]
    assert len(rounds) == 6 and all(sorted(each) == [0, 1, 2] for each in rounds)
    assert len(set(rounds)) > 1
