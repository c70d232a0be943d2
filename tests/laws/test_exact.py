"""`isolation: exact`: the same bits whoever shares the nano-batches."""

import pytest
from support.curves import Curve, Watcher, same_bits
from support.jobs import BY_NAME, ROWS, base_model

from tlora.model.super_model import SuperModel
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine
from tlora.training.loop import run_jobs

SUBJECTS = ("one", "dropped", "upper-layer")
COMPANIES = (
    ("one", "odd", "dropped", "wide", "upper-layer", "widest"),
    ("upper-layer", "wide", "one", "dropped"),
    ("dropped", "upper-layer", "odd", "one"),
)


def train_exactly(names: tuple[str, ...], *, per_sequence: bool = True) -> dict[str, Curve]:
    model = SuperModel(base_model(), per_sequence=per_sequence)
    engine = Engine(model, budget_tokens=192, exact=True)
    drivers = []
    for name in names:
        driver = JobDriver(BY_NAME[name], ROWS[name])
        driver.attach(engine, model.new_adapter(BY_NAME[name]))
        drivers.append(driver)
    watcher = Watcher(engine)
    run_jobs(engine, drivers, watcher)
    return watcher.curves


@pytest.fixture(scope="module")
def alone() -> dict[str, Curve]:
    return {name: train_exactly((name,))[name] for name in SUBJECTS}


@pytest.mark.parametrize("company", COMPANIES, ids=len)
def test_a_job_has_the_same_bits_in_any_company(company, alone):
    """Losses, gradient norms and adapters of 50 steps, compared to the last bit."""
    curves = train_exactly(company)
    for name in set(SUBJECTS) & set(company):
        assert same_bits(curves[name], alone[name]), name


def test_a_cut_that_depends_on_neighbours_is_noticed(alone):
    """Sums over whole segments instead of sequences: right to rounding, but not to the bit."""
    curves = train_exactly(COMPANIES[0], per_sequence=False)
    assert not all(same_bits(curves[name], alone[name]) for name in SUBJECTS)
