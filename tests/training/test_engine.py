"""The engine through its inner interface: feed a job, ask for its step, run nano-batches."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from support.tiny import (
    RARE,
    VOCABULARY,
    Fed,
    base_loss,
    batches,
    distance,
    drive,
    evaluate,
    identical,
    sequence,
    sequences,
    tiny_engine,
    tiny_super_model,
    train,
)

from tlora.core.sequence import TokenSequence
from tlora.model.adapters import AdapterWeights
from tlora.training import optimiser
from tlora.training.compose import Kind
from tlora.training.controller import Controller, ControllerSettings
from tlora.training.engine import EVALUATION_WINDOW, Engine
from tlora.training.optimiser import AdamW
from tlora.training.outcome import EvaluationDone

# Relative, in float32, after the few steps that these tests take. Measured between a job in company
# and the same job alone: at most 1e-6 in the adapters, 4e-8 in the losses.
ROUNDING = 5e-6


@pytest.fixture
def engine() -> Engine:
    return tiny_engine()


def weights(engine: Engine, job: Fed) -> AdapterWeights:
    return engine.super_model.weights(job.name)


def alone(job: Callable[[], Fed], budget_tokens: int = 128) -> tuple[Fed, AdapterWeights]:
    """The job by itself, undisturbed."""
    solo, engine = job(), tiny_engine(budget_tokens)
    outcomes = train(engine, [solo])
    assert not any(outcome.error for outcome in outcomes) and solo.failure is None
    return solo, weights(engine, solo)


def as_alone(engine: Engine, job: Fed, make: Callable[[], Fed]) -> bool:
    solo, expected = alone(make)
    return (
        job.losses == pytest.approx(solo.losses, rel=ROUNDING)
        and distance(weights(engine, job), expected) < ROUNDING
    )


# Feeding and stepping.


def test_a_batch_becomes_a_step(engine: Engine) -> None:
    """What was fed is reported with its own counts, and the loss of a new adapter is the base's."""
    job = Fed("job", batches(1, [6]))
    train(engine, [job])
    (done,) = job.steps
    batch = job.batches[0]
    assert (done.job, done.step, done.sequences) == ("job", 1, 6)
    assert done.tokens == sum(map(len, batch))
    assert done.target_tokens == sum(row.num_targets for row in batch)
    assert done.loss == pytest.approx(base_loss(batch), rel=1e-6)
    assert done.learning_rate == 1e-2 and done.grad_norm > 0


def test_a_batch_may_be_fed_in_parts(engine: Engine) -> None:
    """Feeding some, running it, feeding the rest gives the step of the whole batch, and no sooner
    than it is asked for."""
    rows = sequences(1, 6)
    scale = 1.0 / sum(row.num_targets for row in rows)
    whole, parts = (Fed(name, [rows], dropout=0.2) for name in ("whole", "parts"))
    train(engine, [whole])
    parts.attach(engine)
    engine.feed("parts", rows[:2], loss_scale=scale)
    assert not engine.run_nano_batch().steps
    engine.feed("parts", rows[2:], loss_scale=scale)
    assert not engine.run_nano_batch().steps
    assert not engine.has_work()
    engine.request_step("parts", learning_rate=1e-2, max_grad_norm=1.0)
    assert engine.has_work()
    outcome = engine.run_nano_batch()
    assert outcome.kind is None and [step.job for step in outcome.steps] == ["parts"]
    assert outcome.steps[0].loss == pytest.approx(whole.losses[0], rel=ROUNDING)
    assert distance(weights(engine, parts), weights(engine, whole)) < ROUNDING


def test_accumulation_equals_one_large_batch() -> None:
    """A batch that is spread over many nano-batches gives the same steps as in one."""

    def job() -> Fed:
        return Fed("job", batches(1, [12] * 5), dropout=0.2)

    large, expected = alone(job, budget_tokens=512)
    small, found = alone(job, budget_tokens=32)
    assert {step.nano_batches for step in large.steps} == {1}
    assert min(step.nano_batches for step in small.steps) > 3
    assert small.losses == pytest.approx(large.losses, rel=ROUNDING)
    assert distance(found, expected) < ROUNDING


def tuned_engine(start: int = 32) -> Engine:
    sizes = (32, 64, 128, 256)
    tuned = ControllerSettings(sizes=sizes, start=start, idle=256, limit=256, warm_ups=0)
    return Engine(tiny_super_model(), budget_tokens=start, controller=Controller(tuned))


def test_a_size_that_is_tuned_changes_nothing_that_is_learnt() -> None:
    """Nano-batches of several sizes give the steps of one size; the controller is told of each."""

    def job() -> Fed:
        return Fed("job", batches(1, [30] * 8), dropout=0.2)

    engine, tuned = tuned_engine(), job()
    outcomes = train(engine, [tuned])
    measures = [outcome.measure for outcome in outcomes if outcome.measure is not None]
    assert len({measure.budget for measure in measures}) > 1
    assert as_alone(engine, tuned, job)
    for outcome, measure in zip(outcomes, measures, strict=False):
        assert measure.rows == outcome.rows and measure.tokens == sum(outcome.tokens.values())
        assert measure.seconds == pytest.approx(outcome.seconds, abs=1e-6)
    # The last nano-batch of every batch has what is left, which does not fill it.
    assert {measure.full for measure in measures} == {True, False}


def test_the_controller_is_told_when_jobs_come_and_go() -> None:
    """And of what is not training."""
    engine = tuned_engine()
    first, second = Fed("first", batches(1, [4] * 2)), Fed("second", batches(2, [4]))
    groups = []
    for jobs in ([first], [second]):
        groups += [outcome.measure.group for outcome in train(engine, jobs) if outcome.measure]
    assert len(set(groups)) == 2 and groups == sorted(groups)
    engine.detach("second")
    engine.evaluate("first", sequences(3, 2))
    measure = engine.run_nano_batch().measure
    assert measure is not None and not measure.train and measure.group > groups[-1]


def test_exact_isolation_has_one_size() -> None:
    """A size that follows the clock would change the bits."""
    tuned = ControllerSettings(sizes=(64, 128), start=64, idle=64, limit=128)
    with pytest.raises(ValueError, match="one size"):
        Engine(tiny_super_model(), budget_tokens=64, exact=True, controller=Controller(tuned))


def test_a_lost_sequence_shows() -> None:
    """The comparison that these tests use refuses a batch with one sequence of twelve missing."""

    def job(size: int) -> Fed:
        return Fed("job", [rows[:size] for rows in batches(1, [12] * 3)])

    whole, expected = alone(lambda: job(12))
    short, found = alone(lambda: job(11))
    assert short.losses != pytest.approx(whole.losses, rel=ROUNDING)
    assert not distance(found, expected) < ROUNDING


def test_nothing_to_do_is_no_error(engine: Engine) -> None:
    """A nano-batch without work brings nothing."""
    Fed("job", []).attach(engine)
    assert not engine.has_work()
    outcome = engine.run_nano_batch()
    assert (outcome.kind, outcome.steps, outcome.failures, outcome.error) == (None, (), (), None)


def misuses() -> dict[str, tuple[Callable[[Engine], object], str]]:
    rows = sequences(1, 2)

    def fed(engine: Engine) -> None:
        engine.feed("job", rows, loss_scale=0.1)

    def requested(engine: Engine) -> None:
        fed(engine)
        engine.request_step("job", learning_rate=1e-3)

    def evaluated(engine: Engine) -> None:
        engine.evaluate("job", rows)

    def foreign_state(engine: Engine) -> None:
        Fed("other", [], rank=5).attach(engine)
        state = engine.state("other")
        engine.detach("other")
        Fed("new", []).attach(engine, state=state)

    blank = sequence([1, 2, 3], prompt=3)
    return {
        "feed a stranger": (lambda e: e.feed("x", rows, loss_scale=1.0), "no job 'x' is attached"),
        "step a stranger": (lambda e: e.request_step("x", learning_rate=1.0), "no job 'x'"),
        "evaluate a stranger": (lambda e: e.evaluate("x", rows), "no job 'x'"),
        "detach a stranger": (lambda e: e.detach("x"), "no job 'x'"),
        "state of a stranger": (lambda e: e.state("x"), "no job 'x'"),
        "feed nothing": (lambda e: e.feed("job", [], loss_scale=1.0), "'job' was given no seq"),
        "feed an empty row": (
            lambda e: e.feed("job", [sequence([], origin="f:3")], loss_scale=1.0),
            "'job' was given an empty sequence f:3",
        ),
        "step on nothing": (lambda e: e.request_step("job", learning_rate=1.0), "fed nothing"),
        "step twice": (
            lambda e: (requested(e), e.request_step("job", learning_rate=1.0)),
            "waits for its step already",
        ),
        "feed after the request": (lambda e: (requested(e), fed(e)), "its batch is complete"),
        "feed while evaluated": (lambda e: (evaluated(e), fed(e)), "'job' is being evaluated"),
        "step while evaluated": (
            lambda e: (evaluated(e), e.request_step("job", learning_rate=1.0)),
            "fed nothing to step on",
        ),
        "evaluate while fed": (lambda e: (fed(e), evaluated(e)), "'job' is busy"),
        "evaluate twice": (lambda e: (evaluated(e), evaluated(e)), "'job' is busy"),
        "evaluate nothing": (lambda e: e.evaluate("job", []), "'job' was given no sequences"),
        "evaluate no target": (lambda e: e.evaluate("job", [blank]), "no trained token"),
        "attach twice": (lambda e: Fed("job", []).attach(e), "'job' is attached already"),
        "attach nothing": (
            lambda e: Fed("new", []).attach(e, weights={}),
            "'new' adapts no module",
        ),
        "no weight": (lambda e: Fed("new", [], weight=0.0).attach(e), "weight must be positive"),
        "foreign state": (foreign_state, "'new': the state belongs to another adapter"),
    }


@pytest.mark.parametrize("name", misuses())
def test_misuse_is_a_clear_error(engine: Engine, name: str) -> None:
    """A wrong call raises a ValueError that names the job, and leaves the books in order."""
    call, message = misuses()[name]
    Fed("job", []).attach(engine)
    with pytest.raises(ValueError, match=message):
        call(engine)
    engine.check_integrity()
    assert engine.jobs == ["job"]


def test_no_room_for_a_token_is_refused() -> None:
    """A budget of nothing is a mistake that is told at once."""
    with pytest.raises(ValueError, match="room for a token, got 0"):
        tiny_engine(budget_tokens=0)


# Jobs beside each other.


def test_no_lock_step() -> None:
    """A job of batch 1 takes at least ten steps while a neighbour completes one batch of 64, with
    rows of 16 to 400 tokens in nano-batches of 1,024."""
    engine = tiny_engine(budget_tokens=1024)
    small = Fed("small", batches(1, [1] * 200, shortest=16, longest=400))
    large = Fed("large", batches(2, [64], shortest=16, longest=400))
    for job in (small, large):
        job.attach(engine)
    for _ in drive(engine, [small, large]):
        if large.over:
            break
    assert len(small.steps) >= 10
    # Each of the two had a part in nearly every nano-batch.
    assert large.steps[0].nano_batches >= 10


def test_each_job_has_its_own_rate_clip_and_optimiser(engine: Engine) -> None:
    """Jobs that differ only in how they step end where each ends alone, and apart."""
    rows = batches(1, [3, 1, 4, 2, 5])

    def made(name: str, **options: object) -> Callable[[], Fed]:
        return lambda: Fed(name, rows, **options)

    makers = [
        made("fast", learning_rate=1e-2, max_grad_norm=None),
        made("clipped", learning_rate=1e-3, max_grad_norm=0.05, optimiser=AdamW(epsilon=0.1)),
        made("other", learning_rate=1e-3, optimiser=AdamW(0.5, 0.9, 1e-3, weight_decay=0.3)),
        made("still", learning_rate=0.0, dropout=0.3),
    ]
    jobs = [make() for make in makers]
    train(engine, jobs)
    for job, make in zip(jobs, makers, strict=True):
        assert as_alone(engine, job, make)
    ends = [weights(engine, job) for job in jobs]
    start = engine.super_model.new_adapter(jobs[0].spec)
    assert identical(ends[3], start)
    for one, other in [(0, 1), (1, 2), (0, 2)]:
        assert distance(ends[one], ends[other]) > 1e-2


def test_each_job_is_clipped_to_its_own_norm(engine: Engine) -> None:
    """The first moment after one step is (1 - beta1) times the gradient: of the norm that was asked
    for, or as it came where that is less."""
    limits = {"tight": 0.01, "tighter": 0.001, "wide": 100.0, "none": None}
    rows = batches(1, [4])
    jobs = [Fed(name, rows, max_grad_norm=limit) for name, limit in limits.items()]
    train(engine, jobs)
    for job in jobs:
        moments = [rows.exp_avg.norm() for rows in engine.super_model.views(job.name).values()]
        came = job.steps[0].grad_norm
        expected = min(came, job.max_grad_norm or float("inf"))
        assert came > 0.01
        assert float(torch.stack(moments).norm()) == pytest.approx(0.1 * expected, rel=1e-3)


def test_a_hundred_adapters_train_together() -> None:
    """A hundred jobs of ranks 1 to 10 step side by side, each as alone."""
    engine = tiny_engine(budget_tokens=512)

    def made(i: int) -> Callable[[], Fed]:
        return lambda: Fed(
            f"job{i}", batches(i, [1, 2], longest=12), rank=1 + i % 10, dropout=0.1 * (i % 3)
        )

    jobs = [made(i)() for i in range(100)]
    outcomes = train(engine, jobs)
    assert all(len(job.steps) == 2 for job in jobs)
    assert max(len(outcome.tokens) for outcome in outcomes) > 20
    for i in (0, 37, 99):
        assert as_alone(engine, jobs[i], made(i))


def test_neighbours_that_come_and_go_change_nothing() -> None:
    """A job goes on as alone while others attach, detach in mid-batch, and make the pool grow."""

    def made() -> Fed:
        return Fed("job", batches(1, [4, 2, 6, 3, 5, 4]), dropout=0.1)

    engine = Engine(tiny_super_model(reserve_rows=4), budget_tokens=64)
    job, short, long = made(), Fed("short", batches(2, [2, 2])), Fed("long", batches(3, [30] * 9))
    late = Fed("late", batches(4, [3] * 4), rank=16)

    def change(number: int) -> None:
        if number == 3:
            long.attach(engine)
        if number == 8:
            late.attach(engine)
        if number == 11 and "long" in engine.jobs:
            engine.detach("long")

    for each in (job, short):
        each.attach(engine)
    jobs = [job, short, long, late]
    for number, _ in enumerate(drive(engine, jobs)):
        if short.over and "short" in engine.jobs:
            engine.detach("short")
        change(number)
    assert len(job.steps) == 6 and late.over and not long.over
    assert as_alone(engine, job, made)


# NaN and Inf.


def poison_adapter(engine: Engine) -> None:
    path = next(iter(engine.super_model.views("sick")))
    engine.super_model.views("sick")[path].value[0, 0] = float("nan")


def poison_token(engine: Engine) -> None:
    embedding = engine.super_model.model.get_input_embeddings().weight
    embedding.data[RARE] = float("nan")


@pytest.mark.parametrize("poison", [poison_adapter, poison_token])
def test_nan_fails_its_own_job_only(engine: Engine, poison: Callable[[Engine], None]) -> None:
    """The sick job ends with a reason that names its step and rows; its neighbours end as alone."""

    def made(name: str) -> Callable[[], Fed]:
        seed = {"before": 1, "after": 2}[name]
        return lambda: Fed(name, batches(seed, [3] * 5), dropout=0.1)

    before, after = made("before")(), made("after")()
    rows = [sequence([5, RARE, 7, 9, 4], origin="sick.jsonl:12")]
    sick = Fed("sick", [*batches(9, [2, 2]), rows, rows])

    def infect(number: int) -> None:
        if len(sick.steps) == 2 and sick.failure is None:
            poison(engine)

    train(engine, [before, sick, after], before=infect)
    assert sick.failure is not None and len(sick.steps) == 2
    # A NaN in the queries does not show in the loss: the CPU's attention takes it for -inf.
    assert re.search("(loss|norm) is nan at step 3 .rows sick.jsonl:12.;", str(sick.failure))
    assert engine.jobs == ["before", "after"]
    assert as_alone(engine, before, made("before"))
    assert as_alone(engine, after, made("after"))


def test_an_infinite_gradient_fails_its_own_job_only(engine: Engine) -> None:
    """A loss that is finite with a gradient that is not changes no weights and names the step."""
    well = Fed("well", batches(1, [3] * 3))
    well.attach(engine)
    sick = Fed("sick", [])
    sick.attach(engine)
    rows = sequences(5, 2)
    engine.feed("sick", rows, loss_scale=1e30)
    engine.request_step("sick", learning_rate=1e-2, max_grad_norm=1.0)
    outcomes = list(drive(engine, [well]))
    (failure,) = [failure for outcome in outcomes for failure in outcome.failures]
    assert failure.job == "sick" and "the gradient norm is inf at step 1 (rows" in failure.message
    assert as_alone(engine, well, lambda: Fed("well", batches(1, [3] * 3)))


def test_the_reason_names_the_rows_that_are_sick() -> None:
    """Of a large batch only the rows whose own loss is no number are named, and not too many."""
    engine = tiny_engine(budget_tokens=512)
    poison_token(engine)
    ill = [sequence([RARE, 3, 4], origin=f"f:{i}") for i in range(9)]
    sick = Fed("sick", [[*sequences(1, 20), *ill]])
    train(engine, [sick])
    assert "(rows f:0, f:1, f:2, f:3, f:4 and 4 more)" in str(sick.failure)


def test_padding_reaches_nobody(engine: Engine) -> None:
    """Rows that only fill a bucket belong to no job: a NaN in them changes no number."""

    def made() -> Fed:
        return Fed("job", batches(1, [3] * 3, longest=9), dropout=0.1)

    solo, expected = alone(made)
    engine.super_model.model.get_input_embeddings().weight.data[0] = float("nan")
    job = made()
    outcomes = train(engine, [job])
    assert any(outcome.rows > sum(outcome.tokens.values()) for outcome in outcomes)
    assert job.losses == solo.losses
    assert identical(weights(engine, job), expected)


# Nano-batches that break off.


@contextmanager
def breaking(
    engine: Engine, error: Callable[[], Exception], when: Callable[[torch.Tensor], bool], where: str
) -> Iterator[None]:
    """Raise in the second layer's forward, or in the first layer's backward when the second one's
    gradients are there already, in every nano-batch whose tokens `when` picks."""
    model = engine.super_model.model
    armed = False

    def look(module: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        nonlocal armed
        armed = when(kwargs["input_ids"])

    def fail_forward(module: object, args: object, output: object) -> None:
        if armed and where == "forward":
            raise error()

    def fail_backward(module: object, args: object, output: torch.Tensor) -> None:
        def fail(gradient: torch.Tensor) -> None:
            raise error()

        hidden = output[0] if isinstance(output, tuple) else output
        if armed and where == "backward" and hidden.requires_grad:
            hidden.register_hook(fail)

    handles = [
        model.model.register_forward_pre_hook(look, with_kwargs=True),
        model.model.layers[1].register_forward_hook(fail_forward),
        model.model.layers[0].register_forward_hook(fail_backward),
    ]
    yield
    for handle in handles:
        handle.remove()


def once(at: int) -> Callable[[torch.Tensor], bool]:
    """Picks one nano-batch by its number."""
    count = -1

    def when(ids: torch.Tensor) -> bool:
        nonlocal count
        count += 1
        return count == at

    return when


def holds(token: int) -> Callable[[torch.Tensor], bool]:
    return lambda ids: bool((ids == token).any())


def broken() -> Exception:
    return RuntimeError("a kernel gave up")


def two_jobs() -> list[Callable[[], Fed]]:
    return [
        lambda: Fed("one", batches(1, [8] * 3), dropout=0.1),
        lambda: Fed("two", batches(2, [1, 5, 3, 2]), rank=7),
    ]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_nano_batch_that_breaks_off_changes_nothing(where: str) -> None:
    """No weight moves, partial gradients are gone, the batches run again, and all end as alone."""
    engine = tiny_engine(budget_tokens=64)
    jobs = [make() for make in two_jobs()]
    for job in jobs:
        job.attach(engine)
    states = []

    def watch(number: int) -> None:
        states.append({name: engine.state(name) for name in engine.jobs})

    with breaking(engine, broken, once(at=4), where):
        for number, outcome in enumerate(drive(engine, jobs, before=watch)):
            assert (outcome.error is not None) == (number == 4)
            if number != 4:
                continue
            assert outcome.error == "RuntimeError: a kernel gave up"
            assert not outcome.steps and not outcome.failures
            for name, state in states[4].items():
                assert identical(engine.super_model.weights(name), state.weights)
                assert engine.state(name).step == state.step
                for rows in engine.super_model.views(name).values():
                    assert not rows.grad.any()
    for job, make in zip(jobs, two_jobs(), strict=True):
        assert job.failure is None and as_alone(engine, job, make)


def test_gradients_are_said_to_be_zero_where_they_are_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels do not read them then. Batches of one nano-batch and of several, and one that breaks
    off when a part of its gradients is there."""
    engine = tiny_engine(budget_tokens=32)
    entered = engine.super_model.routed
    said: list[bool] = []

    def watched(batch, *, train):
        for segment in batch.segments if train else []:
            grads = [rows.grad for rows in engine.super_model.views(segment.job).values()]
            assert segment.zero_grad == (not any(grad.any() for grad in grads))
            said.append(segment.zero_grad)
        return entered(batch, train=train)

    monkeypatch.setattr(engine.super_model, "routed", watched)
    jobs = [make() for make in two_jobs()]
    for job in jobs:
        job.attach(engine)
    with breaking(engine, broken, once(at=3), "backward"):
        outcomes = list(drive(engine, jobs))
    assert any(outcome.error for outcome in outcomes)
    assert True in said and False in said


@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_a_token_without_an_embedding_is_refused_by_row(engine: Engine, token: int) -> None:
    """Before it can reach a device, where it would end the process."""
    Fed("one", batches(1, [2])).attach(engine)
    row = sequence([3, token, 4], origin="bad.jsonl:7")
    with pytest.raises(ValueError, match=r"job 'one' .* base model's 64 bad\.jsonl:7"):
        engine.feed("one", [row], loss_scale=1.0)


def test_a_job_that_cannot_run_alone_is_the_one_that_fails() -> None:
    """A row that always breaks, last in a batch of many nano-batches, fails its job after a trial
    by itself; the neighbours, whose batches are as long, end as alone."""
    engine = tiny_engine(budget_tokens=64)
    good = [
        lambda: Fed("one", batches(1, [12] * 2), dropout=0.1),
        lambda: Fed("two", batches(2, [12] * 2)),
    ]
    jobs = [make() for make in good]
    bad = Fed("bad", [*batches(5, [4]), [*sequences(6, 12), sequence([3, RARE, 4])]])
    with breaking(engine, broken, holds(RARE), "forward"):
        outcomes = train(engine, [jobs[0], bad, jobs[1]])
    assert bad.failure is not None and len(bad.steps) == 1
    assert "step 2: RuntimeError" in str(bad.failure)
    assert sum(outcome.error is not None for outcome in outcomes) <= 3
    assert engine.jobs == ["one", "two"]
    for job, make in zip(jobs, good, strict=True):
        assert job.failure is None and as_alone(engine, job, make)


def full_device() -> Exception:
    return torch.OutOfMemoryError("the device is full")


def full_host() -> Exception:
    return RuntimeError("DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("error", [full_device, full_host, MemoryError])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_halves_the_budget(error: Callable[[], Exception], where: str) -> None:
    """Nano-batches shrink until they fit, nobody fails, and all end as alone."""
    engine = tiny_engine(budget_tokens=512)
    jobs = [Fed("one", batches(1, [30] * 2)), Fed("two", batches(2, [20, 3]), rank=7)]
    with breaking(engine, error, lambda ids: ids.numel() > 128, where):
        outcomes = train(engine, jobs)
    assert engine.budget_tokens == 128
    assert sum("out of memory" in (outcome.error or "") for outcome in outcomes) == 2
    assert not any(outcome.failures for outcome in outcomes)
    assert as_alone(engine, jobs[0], lambda: Fed("one", batches(1, [30] * 2)))
    assert as_alone(engine, jobs[1], lambda: Fed("two", batches(2, [20, 3]), rank=7))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_lowers_the_limit_of_a_controller(where: str) -> None:
    """As without one, nobody fails and all end as alone; what did not fit is not tried again."""
    engine = tuned_engine(start=256)
    jobs = [Fed("one", batches(1, [30] * 6)), Fed("two", batches(2, [20] * 6), rank=7)]
    with breaking(engine, full_device, lambda ids: ids.numel() > 128, where):
        outcomes = train(engine, jobs)
    broken = [o.measure for o in outcomes if "out of memory" in (o.error or "")]
    assert broken and all(measure and measure.out_of_memory for measure in broken)
    assert len({measure.rows for measure in broken if measure}) == len(broken)
    assert engine.budget_tokens <= 128 and not any(outcome.failures for outcome in outcomes)
    assert as_alone(engine, jobs[0], lambda: Fed("one", batches(1, [30] * 6)))
    assert as_alone(engine, jobs[1], lambda: Fed("two", batches(2, [20] * 6), rank=7))


def test_a_sequence_that_fits_nowhere_fails_its_job(engine: Engine) -> None:
    """A row too long for the memory by itself fails its job with the reason; others go on."""
    well = Fed("well", batches(1, [6] * 4))
    wide = Fed("wide", [*batches(2, [2]), sequences(3, 1, shortest=300, longest=300)])
    with breaking(engine, full_device, lambda ids: ids.numel() > 256, "forward"):
        train(engine, [well, wide])
    assert wide.failure is not None and len(wide.steps) == 1
    assert wide.failure.message == "step 2: out of memory on 300 tokens"
    assert engine.budget_tokens == 128
    assert as_alone(engine, well, lambda: Fed("well", batches(1, [6] * 4)))


def test_a_long_sequence_goes_alone(engine: Engine) -> None:
    """Longer than the budget, it runs by itself in the smallest multiple that holds it."""
    well = Fed("well", batches(1, [3] * 4))
    long = Fed("long", [sequences(3, 1, shortest=300, longest=300)])
    outcomes = train(engine, [well, long])
    assert [outcome.rows for outcome in outcomes if "long" in outcome.tokens] == [384]
    assert [set(o.tokens) for o in outcomes if "long" in o.tokens] == [{"long"}]
    assert len(well.steps) == 4 and len(long.steps) == 1


def test_a_broken_evaluation_is_run_again(engine: Engine) -> None:
    """A forward-only nano-batch that breaks off starts over; a neighbour's half batch stays."""
    rows = sequences(3, 20)
    job, other = Fed("job", batches(1, [30])), Fed("other", [])
    other.attach(engine)
    expected = evaluate(engine, "other", rows).loss
    job.attach(engine)
    engine.evaluate("other", rows)
    with breaking(engine, broken, once(at=2), "forward"):
        outcomes = list(drive(engine, [job]))
    errors = [outcome.error for outcome in outcomes if outcome.error]
    (done,) = [done for outcome in outcomes for done in outcome.evaluations]
    assert len(errors) <= 1 and done.loss == pytest.approx(expected, rel=1e-12)
    assert as_alone(engine, job, lambda: Fed("job", batches(1, [30])))


# Checkpointing, evaluation, moving.


def test_gradient_checkpointing_gives_the_same_steps() -> None:
    """Activations that are computed again, dropout and all, give the same bits."""

    def made(name: str) -> list[Fed]:
        return [Fed("one", batches(1, [5] * 3), dropout=0.2), Fed("two", batches(2, [2] * 3))]

    plain, checkpointed = tiny_engine(), tiny_engine(gradient_checkpointing=True)
    jobs, others = made("plain"), made("checkpointed")
    train(plain, jobs)
    train(checkpointed, others)
    for job, other in zip(jobs, others, strict=True):
        assert other.losses == job.losses
        assert identical(weights(checkpointed, other), weights(plain, job))


def test_evaluation_is_the_mean_over_all_trained_tokens(engine: Engine) -> None:
    """Dropout is off, and the mean is over tokens, not over rows or nano-batches."""
    rows = sequences(3, 25)
    job = Fed("job", [], dropout=0.5)
    job.attach(engine)
    done = evaluate(engine, "job", rows)
    assert done.loss == pytest.approx(base_loss(rows), rel=1e-6)
    assert (done.step, done.sequences, done.tokens) == (0, 25, sum(map(len, rows)))
    assert done.target_tokens == sum(row.num_targets for row in rows)


def test_evaluation_leaves_training_as_it_was() -> None:
    """A job that is evaluated between steps ends with the bits of one that is not."""

    def made() -> Fed:
        return Fed("job", batches(1, [4] * 4), dropout=0.3)

    solo, expected = alone(made)
    engine, job, rows = tiny_engine(), made(), sequences(9, 12)
    job.attach(engine)
    for _ in drive(engine, [job]):
        before = weights(engine, job)
        first = evaluate(engine, "job", rows)
        assert evaluate(engine, "job", rows) == first
        assert identical(weights(engine, job), before)
    assert job.losses == solo.losses
    assert identical(weights(engine, job), expected)


def test_a_job_trains_on_while_another_is_evaluated(engine: Engine) -> None:
    """A job's training waits for its own evaluation, not for others'."""
    job, other = Fed("job", batches(1, [2] * 10)), Fed("other", [])
    job.attach(engine)
    other.attach(engine)
    engine.evaluate("other", sequences(3, 60))
    kinds = [outcome.kind for outcome in drive(engine, [job])]
    last_evaluation = len(kinds) - 1 - kinds[::-1].index(Kind.EVALUATE)
    assert Kind.TRAIN in kinds[:last_evaluation]
    assert len(job.steps) == 10


def moved(job: Fed, first: Engine, second: Engine, *, after: int, partial: bool) -> None:
    """Detach after some steps, in mid-batch if `partial`, and go on in another engine."""
    job.attach(first)
    for _ in drive(first, [job]):
        if len(job.steps) == after:
            break
    if partial:
        job.feed(first)
        first.run_nano_batch()
        assert len(job.steps) == after
    state = first.state(job.name)
    first.detach(job.name)
    assert state.step == after and not first.jobs
    job.attach(second, weights=state.weights, state=state)
    list(drive(second, [job]))


@pytest.mark.parametrize("partial", [False, True])
def test_detach_and_attach_go_on_exactly(partial: bool) -> None:
    """Taken out and put into another engine, a job ends with the bits of one that stayed; what it
    had of an unfinished batch is dropped and run again."""

    def made() -> Fed:
        optimiser = AdamW(epsilon=1e-3, weight_decay=0.1)
        return Fed("job", batches(1, [12, 9, 14, 11, 8]), dropout=0.2, optimiser=optimiser)

    solo, expected = alone(made)
    job, second = made(), tiny_engine()
    moved(job, tiny_engine(), second, after=2, partial=partial)
    assert job.losses == solo.losses
    assert identical(weights(second, job), expected)


def test_a_lost_moment_shows() -> None:
    """The comparison above refuses a job that went on without its optimiser's moments."""

    def made() -> Fed:
        return Fed("job", batches(1, [4] * 4))

    _, expected = alone(made)
    job, first, second = made(), tiny_engine(), tiny_engine()
    job.attach(first)
    for _ in drive(first, [job]):
        if len(job.steps) == 2:
            break
    job.attach(second, weights=first.state("job").weights)
    list(drive(second, [job]))
    assert not distance(weights(second, job), expected) < ROUNDING


def test_nothing_of_a_job_outlives_it(engine: Engine) -> None:
    """Rows that a detached job leaves are cleared; who takes them over starts like anybody."""
    rows = batches(1, [12])[0]
    for name in ("first", "second"):
        job = Fed(name, [rows])
        job.attach(engine)
        engine.feed(name, rows, loss_scale=1.0)
        engine.run_nano_batch()
        engine.detach(name)
        for pool in engine.super_model.pools:
            for matrix in (pool.a, *pool.b):
                assert not any(tensor.any() for tensor in matrix.tensors)
    heir = Fed("heir", batches(2, [3] * 2))
    train(engine, [heir])
    assert as_alone(engine, heir, lambda: Fed("heir", batches(2, [3] * 2)))


class CountedRows:
    """Held-out rows that know how often they were read."""

    def __init__(self, rows: list[TokenSequence]) -> None:
        self.rows = rows
        self.reads = 0
        self.lost_from = len(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> TokenSequence:
        self.reads += 1
        if index >= self.lost_from:
            raise OSError("the disk is gone")
        return self.rows[index]


def offered_rows(engine: Engine, name: str, rows: CountedRows) -> list[int]:
    """How many rows each composition of an evaluation had to look at."""
    engine.evaluate(name, rows)
    offered: list[int] = []
    while engine.has_work():
        offered.append(len(engine._job(name).waiting().lengths))
        engine.run_nano_batch()
    return offered


def test_an_evaluation_looks_at_a_few_rows_at_a_time(engine: Engine) -> None:
    """However many there are: no composition sees more than a window, and a row is read once to be
    checked and once per evaluation. An engine whose window holds everything is noticed."""
    rows = CountedRows(sequences(3, 600))
    Fed("job", []).attach(engine)
    most = 1 + EVALUATION_WINDOW * engine.budget_tokens // min(map(len, rows.rows))
    offered = offered_rows(engine, "job", rows)
    assert max(offered) <= most < len(rows) // 4 and min(offered[:-1]) >= 2
    assert rows.reads == 2 * len(rows)
    offered_rows(engine, "job", rows)
    assert rows.reads == 3 * len(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tlora.training.engine.EVALUATION_WINDOW", 10**6)
        assert max(offered_rows(engine, "job", rows)) > most


@pytest.mark.parametrize("exact", [False, True])
def test_the_window_of_an_evaluation_changes_no_result(exact: bool) -> None:
    """Against all rows at once: the same loss to rounding; where rows keep their order, to the bit
    and in the same nano-batches, and the same steps of a neighbour."""

    def run(window: int) -> tuple[EvaluationDone, list[dict[str, int]], AdapterWeights]:
        engine = Engine(tiny_super_model(), budget_tokens=128, exact=exact)
        job, other = Fed("job", batches(1, [3] * 6), dropout=0.2), Fed("other", [])
        job.attach(engine)
        other.attach(engine)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tlora.training.engine.EVALUATION_WINDOW", window)
            # One of them longer than a whole window.
            long = sequences(4, 1, shortest=600, longest=600)
            engine.evaluate("other", [*sequences(3, 80), *long, *sequences(5, 20)])
            outcomes = list(drive(engine, [job]))
            while engine.has_work():
                outcomes.append(engine.run_nano_batch())
        (done,) = [done for outcome in outcomes for done in outcome.evaluations]
        return done, [outcome.tokens for outcome in outcomes], weights(engine, job)

    (done, shares, adapter), (whole, all_shares, expected) = run(4), run(10**6)
    if exact:
        assert (done, shares) == (whole, all_shares)
        assert identical(adapter, expected)
    # Company decides with whom a sequence shares a call of attention: 2e-10 was measured.
    assert done.loss == pytest.approx(whole.loss, rel=1e-8)
    assert (done.sequences, done.tokens) == (101, whole.tokens)


def test_a_held_out_row_that_can_no_longer_be_read_fails_its_own_job(engine: Engine) -> None:
    """In the midst of an evaluation; the neighbour goes on."""
    rows = CountedRows(sequences(3, 200))
    job, other = Fed("job", batches(1, [3] * 4)), Fed("other", [])
    job.attach(engine)
    other.attach(engine)
    engine.evaluate("other", rows)
    rows.lost_from = 150
    outcomes = list(drive(engine, [job]))
    while engine.has_work():
        outcomes.append(engine.run_nano_batch())
    (failure,) = [failure for outcome in outcomes for failure in outcome.failures]
    assert failure.job == "other" and "the disk is gone" in failure.message
    assert len(job.steps) == 4 and engine.jobs == ["job"]


def test_a_row_lost_before_a_replay_fails_its_own_job(engine: Engine) -> None:
    """The nano-batch breaks off, and what would be run again can no longer be read."""
    rows = CountedRows(sequences(3, 20))
    job, other = Fed("job", batches(1, [3] * 4)), Fed("other", [])
    job.attach(engine)
    other.attach(engine)
    engine.evaluate("other", rows)
    rows.lost_from = 5
    with breaking(engine, lambda: RuntimeError("broken"), once(at=1), "forward"):
        outcomes = list(drive(engine, [job]))
        while engine.has_work():
            outcomes.append(engine.run_nano_batch())
    (failure,) = [failure for outcome in outcomes for failure in outcome.failures]
    assert failure.job == "other" and "the disk is gone" in failure.message
    assert len(job.losses) == 4
    engine.check_integrity()


def test_a_step_that_cannot_be_taken_fails_its_job_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error inside the optimiser: the neighbour steps once and as alone."""

    def neighbour() -> Fed:
        return Fed("neighbour", batches(3, [4, 4]))

    step_jobs = optimiser.step_jobs

    def breaks_for_one(rows, due):
        if any(each.job == "broken" for each in due):
            raise OverflowError("int too large to convert to float")
        return step_jobs(rows, due)

    monkeypatch.setattr(optimiser, "step_jobs", breaks_for_one)
    broken, other = Fed("broken", batches(2, [4])), neighbour()
    train(engine, [broken, other])
    assert "too large" in str(broken.failure)
    assert other.failure is None
    assert as_alone(engine, other, neighbour)
    engine.check_integrity()


@pytest.mark.parametrize("once", [False, True])
def test_one_call_for_all_fails_nobody_but_the_culprit(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    """Jobs that step together, as on a GPU: one that cannot fails alone, and want of memory that
    passes fails nobody."""

    def neighbours() -> list[Fed]:
        return [Fed(name, batches(seed, [4, 4])) for seed, name in enumerate(("one", "two"))]

    step_jobs, calls = optimiser.step_jobs, []

    def breaks(rows, due):
        calls.append([each.job for each in due])
        if once and len(calls) == 1:
            raise torch.OutOfMemoryError("no room")
        if not once and "broken" in calls[-1]:
            raise OverflowError("int too large to convert to float")
        return step_jobs(rows, due)

    monkeypatch.setattr(optimiser, "step_jobs", breaks)
    monkeypatch.setattr(engine._rows, "in_calls", lambda due: [due] if due else [])
    broken, others = Fed("broken", batches(2, [4])), neighbours()
    train(engine, [broken, *others])
    assert len(calls[0]) == 3, "they step in one call"
    assert (broken.failure is None) == once
    for other, alone_again in zip(others, neighbours(), strict=True):
        assert other.failure is None
        assert as_alone(engine, other, lambda made=alone_again: made)
    engine.check_integrity()


def test_an_attach_that_breaks_off_leaves_nothing_behind(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room in one of the pools: the others give their rows back, and the job may try again."""

    def neighbour() -> Fed:
        return Fed("neighbour", batches(3, [4, 4]))

    pool, late = engine.super_model.pools[-1], Fed("late", batches(2, [4]))
    claim = pool.claim

    def no_room(job: str, weights: AdapterWeights) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(pool, "claim", no_room)
    with pytest.raises(torch.OutOfMemoryError):
        train(engine, [late])
    monkeypatch.setattr(pool, "claim", claim)
    assert not engine.jobs
    engine.check_integrity()
    other = neighbour()
    train(engine, [other])
    assert as_alone(engine, other, neighbour)
