"""Preference jobs in the engine: references, pairs that stay together, figures, and bad input."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.preference import random_pairs
from support.tiny import VOCABULARY, Fed, batches, drive, identical, sequences, spec, tiny_llama
from support.tiny import tiny_super_model as super_model

from tlora.core.sequence import TokenPair
from tlora.training.batch import Preference
from tlora.training.compose import Kind, buckets_for, compose
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine
from tlora.training.engine_job import EngineJob
from tlora.training.loop import run_jobs
from tlora.training.optimiser import AdamW
from tlora.training.outcome import EvaluationDone, Outcome, StepDone
from tlora.training.packed_pairs import sequence_sums
from tlora.training.preference import Dpo
from tlora.training.references import References

CPU = torch.device("cpu")


def pairs(seed: int, count: int) -> list[TokenPair]:
    return random_pairs(seed, count, VOCABULARY - 1, longest=12)


def preference_spec(name: str = "taste", **train: object):
    settings = {"loss": "dpo", "batch_size": 4, "max_steps": 4, **train}
    return spec(name, train=settings, evaluation={"steps": 2})


class Witness:
    """An observer that keeps everything."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outcomes: list[Outcome] = []
        self.steps: list[StepDone] = []
        self.evaluations: list[EvaluationDone] = []
        self.adapters = {}
        self.reasons: dict[str, str | None] = {}

    def on_nano_batch(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        self.steps.append(done)

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        self.evaluations.append(done)

    def on_end(self, driver: JobDriver) -> None:
        self.reasons[driver.name] = driver.reason
        if driver.name in self.engine.jobs:
            self.adapters[driver.name] = self.engine.super_model.weights(driver.name)

    def kinds(self) -> Counter:
        return Counter(outcome.kind for outcome in self.outcomes)


def run(*drivers: JobDriver, engine: Engine | None = None, **options) -> Witness:
    engine = engine or Engine(super_model(), **{"budget_tokens": 128, **options})
    for driver in drivers:
        driver.attach(engine, engine.super_model.new_adapter(driver.spec))
    witness = Witness(engine)
    run_jobs(engine, drivers, witness)
    return witness


def base_sums(pair: TokenPair) -> list[float]:
    """By the plain model, one side at a time."""
    model = tiny_llama().eval()
    found = []
    for side in pair.sequences:
        ids = torch.from_numpy(side.input_ids.astype(np.int64))
        labels = torch.from_numpy(side.labels.astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
        found.append(float(loss))
    return found


def test_references_are_those_of_the_base_model_and_are_made_once() -> None:
    """Two epochs, two evaluations and a second job with the same pairs: each pair runs without the
    adapter once."""
    rows, held_out = pairs(1, 8), pairs(2, 5)
    engine = Engine(super_model(), budget_tokens=128)
    first = run(JobDriver(preference_spec(), rows, held_out), engine=engine)
    references = engine._references
    assert len(references) == 13
    for pair in (*rows, *held_out):
        found = references.of(references.place(pair))
        assert found == pytest.approx(base_sums(pair), rel=1e-5)
        on_device = references.read(torch.tensor([references.place(pair)]))[0]
        assert on_device.tolist() == pytest.approx(found, rel=1e-12)
    tokens = [
        sum(outcome.tokens.values()) for outcome in first.outcomes if outcome.kind is Kind.REFERENCE
    ]
    assert sum(tokens) == sum(map(len, (*rows, *held_out)))
    again = run(JobDriver(preference_spec("other", seed=3), rows, held_out), engine=engine)
    assert not again.kinds()[Kind.REFERENCE]
    assert len(again.steps) == 4


def test_small_batches_share_a_pass_for_references() -> None:
    """Eight batches of one pair: what comes next fills the pass that the first one needs, but
    nothing beyond the job's last step."""
    rows = pairs(1, 20)
    witness = run(JobDriver(preference_spec(batch_size=1, max_steps=8), rows), budget_tokens=2048)
    assert witness.kinds() == {Kind.REFERENCE: 1, Kind.TRAIN: 8}
    assert len(witness.engine._references) == 8


def test_figures_are_those_of_the_pairs() -> None:
    """A step that changes nothing is not told from the base; afterwards the figures are means over
    the pairs, and the loss is that of each pair's margin."""
    rows = pairs(3, 4)
    witness = run(JobDriver(preference_spec(learning_rate=0.05, beta=0.5), rows, rows[:1]))
    first, last = witness.steps[0], witness.steps[-1]
    assert first.loss == pytest.approx(math.log(2), abs=1e-6)
    assert first.figures["margin"] == pytest.approx(0.0, abs=1e-5)
    assert first.sequences == 4
    assert last.loss < first.loss
    assert last.figures["accuracy"] > 0.5
    gap = last.figures["chosen_reward"] - last.figures["rejected_reward"]
    assert last.figures["margin"] == pytest.approx(gap)
    one_pair = witness.evaluations[-1]
    margin = one_pair.figures["margin"]
    assert one_pair.loss == pytest.approx(math.log1p(math.exp(-margin)))
    assert one_pair.figures["accuracy"] == float(margin > 0)


def test_a_supervised_job_has_no_such_figures() -> None:
    witness = run(JobDriver(spec(), sequences(1, 8)))
    assert all(step.figures == {} for step in witness.steps)
    assert witness.kinds().keys() == {Kind.TRAIN}


def test_evaluation_does_not_depend_on_how_it_is_cut() -> None:
    """Mean over the held-out pairs, in one nano-batch or in many."""
    rows, held_out = pairs(4, 4), pairs(5, 20)
    many, one = (
        run(JobDriver(preference_spec(), rows, held_out), budget_tokens=budget).evaluations[-1]
        for budget in (48, 2048)
    )
    assert many.loss == pytest.approx(one.loss, rel=1e-5)
    assert many.figures == pytest.approx(one.figures, rel=1e-4, abs=1e-6)
    assert (many.sequences, many.target_tokens) == (20, sum(pair.num_targets for pair in held_out))


def test_an_engine_that_runs_ahead_gives_the_same_bits() -> None:
    """The step that needs a reference is launched before the host has heard of it."""

    def trained(ahead: int) -> Witness:
        driver = JobDriver(preference_spec(max_steps=6), pairs(6, 12), pairs(7, 3))
        return run(driver, ahead=ahead, budget_tokens=64)

    ahead, behind = trained(2), trained(0)
    assert ahead.steps == behind.steps
    assert ahead.evaluations == behind.evaluations
    assert identical(ahead.adapters["taste"], behind.adapters["taste"])


def test_a_nano_batch_that_breaks_off_is_run_again(monkeypatch) -> None:
    """Out of memory in a pass for references and in a training pass: the end is the same."""
    driver = JobDriver(preference_spec(), pairs(8, 8))
    expected = run(JobDriver(preference_spec(), pairs(8, 8))).adapters["taste"]
    engine = Engine(super_model(), budget_tokens=128)
    losses, calls = engine.super_model.token_losses, []

    def failing(batch):
        calls.append(batch)
        if len(calls) in (1, 4):
            raise torch.OutOfMemoryError("out of memory")
        return losses(batch)

    monkeypatch.setattr(engine.super_model, "token_losses", failing)
    witness = run(driver, engine=engine)
    assert [outcome.error for outcome in witness.outcomes if outcome.error]
    for path, pair in expected.items():
        assert torch.allclose(witness.adapters["taste"][path].b, pair.b, atol=1e-5)


def test_a_base_that_gives_no_number_fails_the_job_by_the_row(monkeypatch) -> None:
    """And nobody else."""
    bad = pairs(9, 1)[0]
    engine = Engine(super_model(), budget_tokens=512)
    losses = engine.super_model.token_losses

    def poisoned(batch):
        found = losses(batch).clone()
        for segment in batch.segments:
            if segment.job == "":
                found[segment.targets] = float("nan")
        return found

    monkeypatch.setattr(engine.super_model, "token_losses", poisoned)
    taste = JobDriver(preference_spec(), [bad])
    witness = run(taste, JobDriver(spec("neighbour"), sequences(1, 8)), engine=engine)
    assert witness.reasons["taste"] == "the base model's own loss is no number (rows pairs:0)"
    assert witness.reasons["neighbour"] is None


def test_a_job_that_finds_a_reference_that_is_no_number_names_the_base(monkeypatch) -> None:
    """The pass was another job's: its own loss is no number either, and no learning rate is to
    blame; where the base gives numbers and the adapter none, the learning rate is."""
    bad = pairs(9, 1)[0]
    engine = Engine(super_model(), budget_tokens=512)
    losses = engine.super_model.token_losses

    def poisoned(batch):
        found = losses(batch).clone()
        for segment in batch.segments:
            if segment.job == "":
                found[segment.targets] = float("nan")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(engine.super_model, "token_losses", poisoned)
        run(JobDriver(preference_spec("first"), [bad]), engine=engine)
    witness = run(JobDriver(preference_spec("second"), [bad]), engine=engine)
    assert witness.reasons["second"] == "the base model's own loss is no number (rows pairs:0)"
    wild = JobDriver(preference_spec("wild", learning_rate=1e38), pairs(3, 8))
    reason = run(wild, engine=Engine(super_model(), budget_tokens=512)).reasons["wild"]
    assert reason is not None and "the usual cause is the learning rate" in reason


def test_rows_of_the_wrong_kind_are_refused() -> None:
    engine = Engine(super_model(), budget_tokens=128)
    model = engine.super_model
    engine.attach("taste", model.new_adapter(spec("taste")), scale=1.0, dpo=Dpo())
    engine.attach("plain", model.new_adapter(spec("plain")), scale=1.0)
    with pytest.raises(ValueError, match="job 'taste' is fed pairs, not sequences"):
        engine.feed("taste", sequences(1, 2), loss_scale=1.0)
    with pytest.raises(ValueError, match="job 'plain' is fed sequences, not pairs"):
        engine.evaluate("plain", pairs(1, 2))


RANDOM = settings(max_examples=60, deadline=None, derandomize=True)


@RANDOM
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    budget=st.integers(8, 96),
    in_order=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_pair_is_never_split(counts, budget, in_order, seed) -> None:
    """Jobs of pairs and of sequences, composed to their ends under any budget: the two sides of a
    pair always follow each other in one share, and every pair comes up once without the adapter
    and once with it."""
    references = References(CPU)
    jobs: dict[str, EngineJob] = {}
    for number, count in enumerate(counts):
        kept = Preference(Dpo(), references) if number % 2 == 0 else None
        job = EngineJob(str(number), 0, 1.0, 4, AdamW(), kept)
        job.feed(list(pairs(seed + number, count)) if kept else list(sequences(seed, count)), 1.0)
        jobs[job.name] = job
    seen: Counter = Counter()
    for _ in range(10 * sum(counts)):
        waiting = [job.waiting() for job in jobs.values() if job.has_waiting]
        if not waiting:
            break
        composition = compose(
            waiting, budget=budget, buckets=buckets_for(budget), in_order=in_order
        )
        assert composition is not None
        tokens = 0
        for pick in composition.picks:
            job = jobs[pick.job]
            passage = job.passage(pick.indices)
            adapted = composition.kind is not Kind.REFERENCE
            share = job.share(passage, adapted=adapted)
            tokens += sum(map(len, share.sequences))
            if job.preference is not None:
                sides = list(zip(share.sequences[::2], share.sequences[1::2], strict=True))
                assert sides == [each.unit.sequences for each in passage.fed]
                assert share.row_offsets[1::2] == [
                    offset + len(chosen)
                    for offset, (chosen, _) in zip(share.row_offsets[::2], sides, strict=True)
                ]
            for each in passage.fed:
                seen[composition.kind, id(each.unit)] += 1
            if adapted:
                passage.batch.launched(passage.fed)
            else:
                places = [each.reference for each in passage.fed]
                references.write(places, torch.tensor(places), torch.zeros(len(places), 2).double())
        assert tokens == composition.tokens
    units = {id(each.unit): each.unit for job in jobs.values() for each in job.batch.fed}
    for key, unit in units.items():
        assert seen[Kind.TRAIN, key] == 1
        # Pairs of two jobs are never alike here, so that each has its own reference.
        assert seen[Kind.REFERENCE, key] == isinstance(unit, TokenPair)


@RANDOM
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    more=st.integers(0, 500),
    seed=st.integers(0, 1000),
)
def test_the_sum_of_a_sequence_depends_on_nothing_around_it(counts, more, seed) -> None:
    """To the bit: neighbours, their number, the place and the longest among them."""
    generator = torch.Generator().manual_seed(seed)
    losses = torch.rand(sum(counts) + 3, generator=generator) * 10
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    together = sequence_sums(
        losses, torch.from_numpy(starts), torch.tensor(counts), max(counts) + more
    )
    for start, count, found in zip(starts, counts, together, strict=True):
        own = losses[start : start + count]
        alone = sequence_sums(own, torch.tensor([0]), torch.tensor([count]), count)
        assert torch.equal(found, alone[0])
        assert float(found) == pytest.approx(float(own.double().sum()), rel=1e-12)


def test_a_job_whose_loss_is_no_number_leaves_its_neighbours_alone() -> None:
    """The adapter of a preference job is poisoned: it fails, a supervised one goes on as alone."""
    alone = Fed("plain", batches(1, (3, 3, 3)))
    engine = Engine(super_model(), budget_tokens=256)
    alone.attach(engine)
    list(drive(engine, [alone]))
    company = Fed("plain", batches(1, (3, 3, 3)))
    engine = Engine(super_model(), budget_tokens=256)
    company.attach(engine)
    engine.attach("taste", engine.super_model.new_adapter(spec("taste")), scale=1.0, dpo=Dpo())
    for rows in engine.super_model.views("taste").values():
        rows.value.fill_(float("nan"))
    engine.feed("taste", pairs(1, 3), loss_scale=1 / 3)
    engine.request_step("taste", learning_rate=0.1)
    outcomes = list(drive(engine, [company]))
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    assert [failure.job for failure in failures] == ["taste"]
    assert company.losses == pytest.approx(alone.losses, rel=1e-6)


def test_the_same_pair_under_another_name_shares_its_reference() -> None:
    """Content counts, labels included."""
    references = References(CPU)
    pair = pairs(1, 1)[0]
    copy = pairs(1, 1)[0]
    swapped = TokenPair(pair.rejected, pair.chosen)
    assert references.place(pair) == references.place(copy)
    assert references.place(pair) != references.place(swapped)
    relabelled = pairs(1, 1)[0]
    relabelled.chosen.labels[-1] = -100
    assert references.place(pair) != references.place(relabelled)
