"""The engine through its inner interface: feed a job, ask for its step, run nano-batches."""

from collections.abc import Callable

import pytest
from support.alone import ROUNDING, alone, as_alone, weights
from support.tiny import (
    VOCABULARY,
    Fed,
    base_loss,
    batches,
    distance,
    drive,
    identical,
    sequence,
    sequences,
    tiny_engine,
    tiny_super_model,
    train,
)

from tlora.training.engine import Engine


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


@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_a_token_without_an_embedding_is_refused_by_row(engine: Engine, token: int) -> None:
    """Before it can reach a device, where it would end the process."""
    Fed("one", batches(1, [2])).attach(engine)
    row = sequence([3, token, 4], origin="bad.jsonl:7")
    with pytest.raises(ValueError, match=r"job 'one' .* base model's 64 bad\.jsonl:7"):
        engine.feed("one", [row], loss_scale=1.0)


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
