"""On a CUDA device the host launches a nano-batch while the one before it runs, and waits for
nothing but its results."""

import time

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tlora.core.job import DataSpec, EvalSpec, JobSpec, LoraSpec, TrainSpec
from tlora.core.sequence import TokenSequence
from tlora.model.super_model import SuperModel
from tlora.runtime.benchmark.phases import marked_phases
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine
from tlora.training.loop import run_jobs
from tlora.training.outcome import EvaluationDone, Outcome, StepDone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

VOCABULARY = 512


def super_model(*, compiled: bool) -> SuperModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    return SuperModel(model, compiled=compiled, reserve_rows=96)


def driver(name: str, rank: int, steps: int, *, evaluated: bool = False) -> JobDriver:
    generator = np.random.default_rng(rank)
    rows = [generator.integers(1, 9, length) for length in generator.integers(16, 120, 64)]
    spec = JobSpec(
        name=name,
        data=DataSpec(path="none"),
        lora=LoraSpec(r=rank),
        train=TrainSpec(batch_size=4, max_steps=steps, learning_rate=3e-3, seed=rank),
        eval=EvalSpec(split=1, steps=5),
    )
    sequences = [TokenSequence(row, row) for row in rows]
    return JobDriver(spec, sequences[8:], sequences[:8] if evaluated else None)


class Losses:
    """An observer."""

    def __init__(self) -> None:
        self.steps: dict[str, list[tuple[int, float, float]]] = {}
        self.evaluations: dict[str, list[tuple[int, float]]] = {}

    def on_nano_batch(self, outcome: Outcome) -> None:
        assert outcome.error is None

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        self.steps.setdefault(done.job, []).append((done.step, done.loss, done.grad_norm))

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        self.evaluations.setdefault(done.job, []).append((done.step, done.loss))

    def on_end(self, driver: JobDriver) -> None:
        assert driver.reason is None


def trained(ahead: int, *, jobs: int) -> Losses:
    engine = Engine(super_model(compiled=False), budget_tokens=1024, ahead=ahead)
    drivers = [driver(f"job-{rank}", rank, 12, evaluated=rank == 8) for rank in (8, 16, 64)[:jobs]]
    for each in drivers:
        each.attach(engine, engine.super_model.new_adapter(each.spec))
    losses = Losses()
    run_jobs(engine, drivers, losses)
    return losses


def test_a_job_alone_has_the_same_figures_to_the_bit() -> None:
    """Nobody else decides what its nano-batches are: reading results late changes nothing."""
    read_at_once, read_late = trained(0, jobs=1), trained(1, jobs=1)
    assert read_late.steps == read_at_once.steps
    assert read_late.evaluations == read_at_once.evaluations
    assert len(read_late.steps["job-8"]) == 12 and len(read_late.evaluations["job-8"]) == 4


def test_jobs_together_learn_the_same() -> None:
    """Company differs where a job waits to be evaluated; losses stay within rounding."""
    read_at_once, read_late = trained(0, jobs=3), trained(1, jobs=3)
    for name, expected in read_at_once.steps.items():
        found = [loss for _, loss, _ in read_late.steps[name]]
        wanted = [loss for _, loss, _ in expected]
        assert np.allclose(found, wanted, rtol=0, atol=0.05)
        assert wanted[-1] < wanted[0] - 0.3, "it learns, so a lost step shows"


@pytest.mark.parametrize("compiled", [False, True])
def test_no_nano_batch_waits_for_the_device(compiled: bool) -> None:
    """torch raises where the host would wait; only the copies' event is waited for, which it does
    not count. Reading a loss at once is refused."""
    engine = Engine(super_model(compiled=compiled), budget_tokens=1024, bucket_step=1024)
    drivers = {f"job-{rank}": driver(f"job-{rank}", rank, 90) for rank in (8, 16, 64)}
    for each in drivers.values():
        each.attach(engine, engine.super_model.new_adapter(each.spec))

    def nano_batch() -> Outcome:
        for each in drivers.values():
            each.advance(engine)
        outcome = engine.run_nano_batch()
        for step in outcome.steps:
            drivers[step.job].on_step(step)
        return outcome

    for _ in range(10):
        nano_batch()
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps = sum(len(nano_batch().steps) for _ in range(10))
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(3, device="cuda").sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert steps >= 10


def waits_pct(host_s: float) -> float:
    """Of the device, where the host does `host_s` of other work before every nano-batch."""
    engine = Engine(super_model(compiled=False), budget_tokens=1024, bucket_step=1024)
    jobs = [driver(f"job-{rank}", rank, 30) for rank in (8, 16)]
    for each in jobs:
        each.attach(engine, engine.super_model.new_adapter(each.spec))

    def nano_batches(count: int) -> None:
        for _ in range(count):
            time.sleep(host_s)
            for each in jobs:
                each.advance(engine)
            for step in engine.run_nano_batch().steps:
                next(each for each in jobs if each.name == step.job).on_step(step)

    nano_batches(8)
    with marked_phases(engine.super_model) as spans:
        nano_batches(12)
    found = spans.waits_pct()
    assert found is not None
    return found


def test_a_slow_host_is_seen_as_a_device_that_waits() -> None:
    """Fifty milliseconds before nano-batches that take a few; without them it waits less."""
    slow = waits_pct(0.05)
    assert slow > 60
    assert waits_pct(0.0) < slow - 20
