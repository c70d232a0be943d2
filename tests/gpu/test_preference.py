"""Preference jobs on a CUDA device: as on a CPU, without waiting, and with the same bits."""

from dataclasses import replace

import pytest
import torch
from support.curves import Curve, Watcher, difference
from support.jobs import BY_NAME, ROWS, base_model
from support.preference import PAIR_JOBS, PAIRS, STEPS

from tlora.core.job import JobSpec, LoraSpec
from tlora.model.super_model import SuperModel
from tlora.training.compose import Kind
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine
from tlora.training.loop import run_jobs
from tlora.training.outcome import Outcome
from tlora.training.packed_pairs import sequence_sums

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
COMPANY = [
    replace(each, train=replace(each.train, max_steps=STEPS))
    for each in (BY_NAME["one"], BY_NAME["odd"])
]
# As in test_cuda.py; a margin is a difference of sums, so the rounding of products weighs more.
ACROSS_DEVICES = 1e-3


def entered(engine: Engine, specs: list[JobSpec]) -> list[JobDriver]:
    drivers = []
    for spec in specs:
        driver = JobDriver(spec, (PAIRS if spec.name in PAIRS else ROWS)[spec.name])
        driver.attach(engine, engine.super_model.new_adapter(spec))
        drivers.append(driver)
    return drivers


def trained(device: str, specs: list[JobSpec], *, exact: bool = False) -> dict[str, Curve]:
    model = SuperModel(base_model().to(device), per_sequence=exact)
    engine = Engine(model, budget_tokens=192, exact=exact)
    watcher = Watcher(engine)
    run_jobs(engine, entered(engine, specs), watcher)
    assert not watcher.failed
    return watcher.curves


def test_preference_jobs_train_on_the_device_as_on_the_cpu() -> None:
    """In float32 beside supervised jobs, dropout included. They are of one rank and on all linears:
    kernels are compiled for every other set of ranks, in float32 for many seconds."""
    torch.backends.cuda.matmul.allow_tf32 = False
    specs = [
        replace(each, lora=LoraSpec(r=8, lora_alpha=16.0, lora_dropout=0.1))
        for each in (*PAIR_JOBS, *COMPANY)
    ]
    on_cpu, on_device = (trained(each, specs) for each in ("cpu", "cuda"))
    for name, curve in on_cpu.items():
        assert difference(on_device[name], curve).within(ACROSS_DEVICES), name


def test_with_exact_isolation_they_have_the_same_bits_in_any_company() -> None:
    subject = PAIR_JOBS[0]
    alone = trained("cuda", [subject], exact=True)[subject.name]
    together = trained("cuda", [COMPANY[0], *PAIR_JOBS, COMPANY[1]], exact=True)[subject.name]
    assert together.losses == alone.losses
    assert together.grad_norms == alone.grad_norms
    for path, pair in alone.adapter.items():
        assert together.adapter[path].b.equal(pair.b), path


@pytest.mark.parametrize("compiled", [False, True])
def test_no_nano_batch_with_pairs_waits_for_the_device(compiled: bool) -> None:
    """Passes for references and training passes alike: torch raises where the host would wait."""
    model = SuperModel(base_model().to("cuda", torch.bfloat16), compiled=compiled)
    engine = Engine(model, budget_tokens=192, bucket_step=192)
    drivers = {each.name: each for each in entered(engine, [*PAIR_JOBS, *COMPANY])}

    def nano_batch() -> Outcome:
        for each in drivers.values():
            each.advance(engine)
        outcome = engine.run_nano_batch()
        for step in outcome.steps:
            drivers[step.job].on_step(step)
        return outcome

    kinds = {nano_batch().kind for _ in range(12)}
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcomes = [nano_batch() for _ in range(12)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert Kind.REFERENCE in kinds | {outcome.kind for outcome in outcomes}
    assert any(step.job == "pairs" for outcome in outcomes for step in outcome.steps)


def test_sums_of_sequences_have_the_bits_of_the_cpu() -> None:
    """A fold in halves of float64 is the same additions everywhere."""
    counts = torch.tensor([5, 130, 1, 77])
    starts = torch.tensor([0, 5, 135, 136])
    losses = torch.rand(213) * 10
    on_cpu = sequence_sums(losses, starts, counts, 130)
    on_device = sequence_sums(losses.cuda(), starts.cuda(), counts.cuda(), 4096)
    assert torch.equal(on_device.cpu(), on_cpu)
