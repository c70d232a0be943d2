"""An engine that launches a nano-batch before it reads the results of the last one: the same
training, told a little later."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.tiny import (
    RARE,
    Fed,
    batches,
    identical,
    sequence,
    sequences,
    spec,
    tiny_super_model,
)

from tlora.core.job import JobSpec, SaveSpec
from tlora.model.adapters import AdapterWeights
from tlora.training import optimiser
from tlora.training.driver import JobDriver, Status
from tlora.training.engine import Engine
from tlora.training.loop import run_jobs
from tlora.training.outcome import EvaluationDone, Outcome, StepDone


def weights(engine: Engine, job: Fed) -> AdapterWeights:
    return engine.super_model.weights(job.name)


class Witness:
    """An observer that keeps all figures, and compares engine and driver at every step that
    somebody looks at."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps: dict[str, list[StepDone]] = {}
        self.evaluations: dict[str, list[EvaluationDone]] = {}
        self.ends: dict[str, Status] = {}
        self.adapters: dict[str, AdapterWeights] = {}
        self.saved: dict[str, list[AdapterWeights]] = {}
        self.lags: list[int] = []

    def on_nano_batch(self, outcome: Outcome) -> None:
        assert not outcome.is_empty

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        self.steps.setdefault(driver.name, []).append(done)
        if driver.name in self.engine.jobs:
            self.lags.append(self.engine.step(driver.name) - driver.step)
        every = driver.spec.save.steps
        if every is not None and done.step % every == 0:
            assert self.engine.step(driver.name) == driver.step, "saved when it had gone on"
            saved = self.engine.super_model.weights(driver.name)
            self.saved.setdefault(driver.name, []).append(saved)

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        assert self.engine.step(driver.name) == driver.step == done.step
        self.evaluations.setdefault(driver.name, []).append(done)

    def on_end(self, driver: JobDriver) -> None:
        self.ends[driver.name] = driver.status
        if driver.name in self.engine.jobs:
            self.adapters[driver.name] = self.engine.super_model.weights(driver.name)


def jobs() -> list[tuple[JobSpec, int, bool]]:
    """Specs, the seeds of their rows, and whether they are evaluated."""
    plain = spec("plain", train={"max_steps": 9, "batch_size": 3})
    watched = spec(
        "watched", train={"max_steps": 8}, lora={"lora_dropout": 0.2}, evaluation={"steps": 3}
    )
    saved = replace(spec("saved", train={"max_steps": 7}, lora={"r": 8}), save=SaveSpec(steps=2))
    large = spec("large", train={"max_steps": 3, "batch_size": 30})
    return [(plain, 1, False), (watched, 2, True), (saved, 3, False), (large, 4, False)]


def run(ahead: int, *, exact: bool = True) -> Witness:
    model = tiny_super_model(per_sequence=exact)
    engine = Engine(model, budget_tokens=128, exact=exact, ahead=ahead)
    drivers = []
    for job, seed, evaluated in jobs():
        held_out = sequences(seed + 50, 12) if evaluated else None
        drivers.append(JobDriver(job, sequences(seed, 40), held_out))
        drivers[-1].attach(engine, model.new_adapter(job))
    witness = Witness(engine)
    assert run_jobs(engine, drivers, witness) == []
    engine.check_integrity()
    return witness


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_running_ahead_changes_no_bit(ahead: int) -> None:
    """Steps, evaluations, saved and final adapters, with batches over several nano-batches; where
    bits do not depend on company, which may change a little."""
    plain, found = run(0), run(ahead)
    assert set(plain.lags) == {0} and max(found.lags) == ahead, "it does run ahead"
    for name, steps in plain.steps.items():
        told = [replace(step, nano_batches=0) for step in steps]
        assert [replace(step, nano_batches=0) for step in found.steps[name]] == told
        assert identical(found.adapters[name], plain.adapters[name]), name
    assert found.evaluations == plain.evaluations and len(found.evaluations["watched"]) == 4
    assert len(found.saved["saved"]) == 3
    for one, other in zip(found.saved["saved"], plain.saved["saved"], strict=True):
        assert identical(one, other)
    assert set(found.ends.values()) == {Status.COMPLETED} and len(found.ends) == 4


def feed_all(engine: Engine, jobs: list[Fed]) -> list[Outcome]:
    """Every job is fed as soon as the engine takes more of it, whatever it has heard."""
    fed = dict.fromkeys([job.name for job in jobs], 0)
    outcomes = []
    while True:
        for job in jobs:
            ready = job.name in engine.jobs and engine.is_free(job.name)
            if ready and fed[job.name] < len(job.batches):
                batch = job.batches[fed[job.name]]
                scale = 1.0 / sum(each.num_targets for each in batch)
                engine.feed(job.name, batch, loss_scale=scale)
                engine.request_step(job.name, learning_rate=1e-2, max_grad_norm=1.0)
                fed[job.name] += 1
        if not engine.has_work():
            return outcomes
        outcomes.append(engine.run_nano_batch())
        engine.check_integrity()
        for job in jobs:
            job.steps += [step for step in outcomes[-1].steps if step.job == job.name]
            failures = [each for each in outcomes[-1].failures if each.job == job.name]
            job.failure = failures[0] if failures else job.failure


def exact_engine(ahead: int) -> Engine:
    return Engine(tiny_super_model(per_sequence=True), budget_tokens=128, exact=True, ahead=ahead)


def trained(
    make: Callable[[], list[Fed]], ahead: int, disturb: Callable[[Engine], object] | None = None
) -> tuple[list[Fed], Engine, list[Outcome]]:
    made, engine = make(), exact_engine(ahead)
    for job in made:
        job.attach(engine)
    if disturb is not None:
        disturb(engine)
    return made, engine, feed_all(engine, made)


def two() -> list[Fed]:
    return [Fed("one", batches(1, [4] * 5), dropout=0.2), Fed("other", batches(2, [12, 3, 3]))]


def test_a_nano_batch_that_breaks_off_takes_nothing_of_the_last_one_with_it() -> None:
    """No room for the third one, whose predecessor has not been read: the batches in it are run
    again, the steps that were launched are reported once, and all bits are as undisturbed."""

    def no_room_once(engine: Engine) -> None:
        model, count = engine.super_model, [0]
        token_losses = model.token_losses

        def fails(batch):
            count[0] += 1
            if count[0] == 3:
                raise RuntimeError("broken")
            return token_losses(batch)

        model.token_losses = fails  # type: ignore[method-assign]

    calm, quiet_engine, _ = trained(two, 0)
    found, engine, outcomes = trained(two, 1, no_room_once)
    assert [outcome.error for outcome in outcomes].count("RuntimeError: broken") == 1
    for job, expected in zip(found, calm, strict=True):
        assert job.losses == expected.losses and job.failure is None
        assert [step.step for step in job.steps] == list(range(1, len(job.batches) + 1))
        assert identical(weights(engine, job), weights(quiet_engine, expected))


def test_a_job_whose_loss_is_no_number_fails_after_its_next_batch_was_launched() -> None:
    """It is told of the step at fault, and once; the other's bits are as if it had been alone."""

    def make() -> list[Fed]:
        broken = [sequences(3, 2), [sequence([RARE] * 6, origin="bad:1")], *batches(5, [2, 2, 2])]
        return [Fed("broken", broken), Fed("well", batches(1, [4] * 6))]

    def poison(engine: Engine) -> None:
        embedding = engine.super_model.model.get_input_embeddings().weight
        with torch.no_grad():
            embedding[RARE] = float("nan")

    found, engine, outcomes = trained(make, 1, poison)
    broken, well = found
    assert engine.jobs == ["well"] and len(broken.steps) == 1
    assert sum(len(outcome.failures) for outcome in outcomes) == 1
    assert "at step 2" in str(broken.failure) and "bad:1" in str(broken.failure)
    (alone,), solo, _ = trained(lambda: make()[1:], 0, poison)
    assert well.losses == alone.losses
    assert identical(weights(engine, well), weights(solo, alone))


def test_stopping_tells_every_job_of_its_last_step() -> None:
    """Asked to stop, the loop reads what is under way: engine and driver stand at the same step,
    so that the job can be saved."""
    model = tiny_super_model()
    engine = Engine(model, budget_tokens=128, ahead=1)
    drivers = [JobDriver(spec(name, train={"max_steps": 50}), sequences(1, 40)) for name in "ab"]
    for driver in drivers:
        driver.attach(engine, model.new_adapter(driver.spec))
    witness = Witness(engine)
    left = run_jobs(
        engine, drivers, witness, should_stop=lambda: len(witness.steps.get("a", [])) == 5
    )
    assert len(left) == 2 and not list(engine.drain())
    for driver in left:
        assert driver.step == engine.step(driver.name) >= 5
        assert driver.progress()["step"] == driver.step


def test_a_detached_job_is_not_heard_of_again() -> None:
    """Its launched steps are dropped with it; a new job of its name is not told of them."""
    engine = exact_engine(1)
    old, new = Fed("job", batches(1, [3] * 2)), Fed("job", batches(2, [3] * 2))
    old.attach(engine)
    old.feed(engine)
    assert engine.run_nano_batch().is_empty and engine.has_work()
    engine.detach("job")
    new.attach(engine)
    outcomes = feed_all(engine, [new])
    assert [step.step for outcome in outcomes for step in outcome.steps] == [1, 2]
    alone = Fed("job", batches(2, [3] * 2))
    solo = exact_engine(0)
    alone.attach(solo)
    feed_all(solo, [alone])
    assert new.losses == alone.losses


def test_a_job_that_left_with_a_step_untold_does_not_go_on_elsewhere() -> None:
    """Its data would be a batch behind its weights; after a drain it goes on as if it had not
    moved."""

    def moved(*, drained: bool) -> tuple[JobDriver, Engine]:
        job = spec(train={"max_steps": 6})
        driver, first, second = JobDriver(job, sequences(1, 40)), exact_engine(1), exact_engine(1)
        driver.attach(first, first.super_model.new_adapter(job))
        while driver.step < 3:
            driver.advance(first)
            for done in first.run_nano_batch().steps:
                driver.on_step(done)
        for outcome in first.drain() if drained else ():
            for done in outcome.steps:
                driver.on_step(done)
        state = first.state("job")
        first.detach("job")
        driver.attach(second, state.weights, state)
        return driver, second

    with pytest.raises(ValueError, match=r"is of step 4.*heard of is 3"):
        moved(drained=False)
    driver, engine = moved(drained=True)
    witness = Witness(engine)
    run_jobs(engine, [driver], witness)
    stayed, solo = JobDriver(driver.spec, sequences(1, 40)), exact_engine(0)
    stayed.attach(solo, solo.super_model.new_adapter(driver.spec))
    expected = Witness(solo)
    run_jobs(solo, [stayed], expected)
    assert [step.step for step in witness.steps["job"]] == [5, 6]
    assert identical(witness.adapters["job"], expected.adapters["job"])


def attached(engine: Engine, *names: str) -> list[JobDriver]:
    """Jobs of eight steps over two rows each."""
    drivers = []
    for seed, name in enumerate(names):
        job = spec(name, train={"max_steps": 8, "batch_size": 2})
        drivers.append(JobDriver(job, sequences(seed, 40)))
        drivers[-1].attach(engine, engine.super_model.new_adapter(job))
    return drivers


def test_a_job_that_fails_by_itself_has_told_its_last_step() -> None:
    """Its fourth step breaks every nano-batch while the third is under way: it hears of that one,
    then fails, once; the other completes."""
    engine = exact_engine(1)
    drivers = attached(engine, "broken", "well")
    token_losses = engine.super_model.token_losses

    def fails(batch):
        jobs = [segment.job for segment in batch.segments]
        if "broken" in jobs and engine.step("broken") == 3:
            raise RuntimeError("broken")
        return token_losses(batch)

    engine.super_model.token_losses = fails  # type: ignore[method-assign]
    witness = Witness(engine)
    assert run_jobs(engine, drivers, witness) == []
    assert witness.ends == {"broken": Status.FAILED, "well": Status.COMPLETED}
    assert [done.step for done in witness.steps["broken"]] == [1, 2, 3]
    assert "step 4: RuntimeError: broken" in str(drivers[0].reason)


def test_a_job_that_fails_in_two_ways_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number for a loss, and a step that cannot be launched: the other completes."""
    engine = exact_engine(1)
    drivers = attached(engine, "broken", "well")
    token_losses, step_jobs = engine.super_model.token_losses, optimiser.step_jobs

    def no_number(batch):
        losses = token_losses(batch)
        for segment in batch.segments:
            if segment.job == "broken" and engine.step("broken") == 2:
                losses = losses.clone()
                losses[segment.targets] *= float("nan")
        return losses

    def too_large(rows, due):
        if (due[0].job, due[0].number) == ("broken", 3):
            raise OverflowError("beyond what float32 holds")
        return step_jobs(rows, due)

    monkeypatch.setattr(engine.super_model, "token_losses", no_number)
    monkeypatch.setattr(optimiser, "step_jobs", too_large)
    witness = Witness(engine)
    assert run_jobs(engine, drivers, witness) == []
    assert witness.ends == {"broken": Status.FAILED, "well": Status.COMPLETED}


class Stumbles(Witness):
    """Breaks at one step of one job, when it has noted it."""

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        super().on_step(driver, done)
        if (done.job, done.step) == ("one", 3):
            raise RuntimeError("a mistake in the view")


def test_an_observer_that_breaks_leaves_no_job_between_two_steps() -> None:
    """The other's step of that nano-batch and all that is under way is told: steps, cursors and
    engine agree, so that both can be saved."""
    engine = exact_engine(1)
    drivers = attached(engine, "one", "other")
    witness = Stumbles(engine)
    with pytest.raises(RuntimeError, match="a mistake in the view"):
        run_jobs(engine, drivers, witness)
    for driver in drivers:
        assert driver.step == engine.step(driver.name) > 3
        assert [done.step for done in witness.steps[driver.name]] == list(range(1, driver.step + 1))
        assert driver.cursor.position == driver.sequences_seen == 2 * driver.step


def test_a_driver_refuses_a_step_after_one_that_it_has_not_heard_of() -> None:
    """Its cursor would be a batch behind its weights."""
    engine = exact_engine(1)
    (driver,) = attached(engine, "job")
    told: list[StepDone] = []
    while len(told) < 2:
        driver.advance(engine)
        told += engine.run_nano_batch().steps
    with pytest.raises(ValueError, match=r"job 'job'.*step 2.*step 0"):
        driver.on_step(told[1])
    assert driver.step == 0
