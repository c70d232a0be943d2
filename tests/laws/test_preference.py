"""Preference jobs among supervised ones: trained as alone, and as a plain loop trains them.

The limits and comparisons are those of the law of isolation; the broken twins at the end are
refused by them.
"""

import pytest
from support.curves import Curve, Watcher, difference, linear_numbers, train_with_peft
from support.jobs import BY_NAME, ROWS, base_model
from support.preference import PAIR_JOBS, PAIRS, STEPS, PlainDpo

from tlora.core.job import JobSpec
from tlora.model.super_model import SuperModel
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine
from tlora.training.engine_job import EngineJob
from tlora.training.loop import run_jobs

# Relative, after 20 steps in float32. A margin is a difference of sums over tokens, so a rounding
# of the losses weighs more than in the mean of supervised jobs. Measured: at most 1e-6 in the
# losses, 2e-6 in the gradient norms, 7e-6 in the adapters.
ROUNDING = 2e-5

BY_PAIRS = {spec.name: spec for spec in PAIR_JOBS}
NEIGHBOURS = [BY_NAME[name] for name in ("one", "odd", "dropped")]


def train_together(
    specs: list[JobSpec], *, budget: int = 192, exact: bool = False
) -> dict[str, Curve]:
    model = SuperModel(base_model(), reserve_rows=8, per_sequence=exact)
    engine = Engine(model, budget_tokens=budget, bucket_step=32, exact=exact)
    drivers = []
    for spec in specs:
        driver = JobDriver(spec, (PAIRS if spec.name in PAIRS else ROWS)[spec.name])
        driver.attach(engine, model.new_adapter(spec))
        drivers.append(driver)
    watcher = Watcher(engine)
    run_jobs(engine, drivers, watcher)
    assert not watcher.failed
    return watcher.curves


def plainly(name: str, **changes: object) -> Curve:
    model, spec = SuperModel(base_model()), BY_PAIRS[name]
    return train_with_peft(
        base_model(),
        spec,
        PAIRS[name],
        model.new_adapter(spec),
        linear_numbers(model),
        objective=PlainDpo.of(spec, **changes).objective(),
    )


@pytest.fixture(scope="module")
def together() -> dict[str, Curve]:
    return train_together([*PAIR_JOBS, *NEIGHBOURS])


@pytest.mark.parametrize("name", BY_PAIRS)
def test_a_preference_job_in_company_trains_as_it_trains_alone(name, together):
    """Losses, gradient norms and the adapter, under another budget too."""
    alone = train_together([BY_PAIRS[name]], budget=128)[name]
    assert difference(together[name], alone).within(ROUNDING)


@pytest.mark.parametrize("name", BY_PAIRS)
def test_a_preference_job_in_company_trains_as_a_plain_loop_trains_it(name, together):
    """PEFT with its adapter off for the reference, the loss as it is written, torch's AdamW."""
    assert len(together[name].losses) == STEPS
    assert difference(together[name], plainly(name)).within(ROUNDING)


def test_training_lowers_the_loss(together):
    """The curves compared above are not those of a model that stands still: at first nothing
    tells the adapter from the base model."""
    assert together["pairs"].losses[0] == pytest.approx(0.6931472, abs=1e-6)
    assert min(together["pairs"].losses[-3:]) < 0.5


def test_supervised_jobs_beside_preference_jobs_train_as_alone(together):
    for spec in NEIGHBOURS:
        alone = train_together([spec], budget=128)[spec.name]
        assert difference(together[spec.name], alone).within(ROUNDING), spec.name


def same_bits(one: Curve, other: Curve) -> bool:
    return one.losses == other.losses and all(
        one.adapter[path].a.equal(pair.a) and one.adapter[path].b.equal(pair.b)
        for path, pair in other.adapter.items()
    )


def test_with_exact_isolation_a_preference_job_has_the_same_bits_in_any_company():
    """And so have the supervised ones beside it."""
    alone = {
        spec.name: train_together([spec], exact=True)[spec.name]
        for spec in (*PAIR_JOBS, BY_NAME["odd"])
    }
    for company in ([*NEIGHBOURS, *PAIR_JOBS], [PAIR_JOBS[1], BY_NAME["odd"], PAIR_JOBS[0]]):
        curves = train_together(company, exact=True)
        for name, curve in alone.items():
            assert same_bits(curves[name], curve), name


# Broken twins: each breaks the loss a little, and the comparison above must see it.


@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.303},
        {"label_smoothing": 0.01},
        {"sign": -1.0},
        {"over_tokens": True},
        {"with_reference": False},
    ],
    ids=str,
)
def test_a_slightly_other_loss_is_refused(changes, together):
    assert not difference(together["pairs"], plainly("pairs", **changes)).within(ROUNDING)


def test_a_reference_with_the_adapter_on_is_refused(together, monkeypatch):
    share = EngineJob.share
    monkeypatch.setattr(
        EngineJob, "share", lambda self, passage, adapted=True: share(self, passage)
    )
    wrong = train_together([BY_PAIRS["pairs"]])["pairs"]
    assert not difference(together["pairs"], wrong).within(ROUNDING)
