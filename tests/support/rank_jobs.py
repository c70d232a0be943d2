"""The jobs that ranks train in tests, the model in shards, and what a rank tells of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from support.curves import Curve, Watcher
from support.jobs import BY_NAME, ROWS
from tlora.core.job import BaseSpec, EvalSpec, JobSpec
from tlora.core.plan import Plan
from tlora.core.sequence import TokenSequence
from tlora.model.super_model import SuperModel
from tlora.parallel.counting import Counts
from tlora.parallel.mesh import shard_mesh
from tlora.parallel.shard_loading import load_sharded
from tlora.parallel.sharding import Sharded
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine
from tlora.training.group_engine import Usage
from tlora.training.outcome import EvaluationDone, Outcome
from tlora.training.size_search import Decision

STEPS = {"one": 14, "odd": 6, "dropped": 8, "wide": 5, "upper-layer": 12, "widest": 7}
"""They end at different times."""

LATE = {3: "widest", 6: "upper-layer"}
"""These come before the agreement of that number."""

FIRST = ("one", "odd", "dropped", "wide")
HELD_OUT = ROWS["one"][:5]


def spec_of(name: str) -> JobSpec:
    spec = BY_NAME[name]
    # After so few steps Adam would make whole steps of gradients that are next to nothing, and with
    # them of their rounding (support/tiny.py).
    train = replace(spec.train, max_steps=STEPS[name], adam_epsilon=1e-3)
    return replace(spec, train=train, eval=EvalSpec(split=5, steps=4))


def new_driver(name: str, rows: Sequence[TokenSequence] | None = None) -> JobDriver:
    return JobDriver(spec_of(name), rows or ROWS[name], HELD_OUT)


class Seen(Watcher):
    """Evaluations too, and what broke off."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.evaluations: dict[str, list[float]] = {}
        self.errors: list[str] = []
        self.decisions: list[Decision] = []

    def on_nano_batch(self, outcome: Outcome) -> None:
        self.decisions += outcome.decisions
        if outcome.error is not None:
            self.errors.append(outcome.error)

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        self.evaluations.setdefault(driver.name, []).append(done.loss)


@dataclass
class Told:
    """By one rank."""

    curves: dict[str, Curve]
    evaluations: dict[str, list[float]]
    failed: dict[str, str]
    errors: list[str]
    counts: dict[str, dict[str, int]]
    """Of training alone."""

    usage: Usage
    budget: int = 0
    """Tokens of a nano-batch, in the end."""

    breaks: int = 0
    """Passes that were broken on purpose."""

    kept_layers: int = 0
    """In the end."""

    budgets: list[tuple[int, int]] = field(default_factory=list)
    """Agreed on, and in use here, after each turn."""

    actions: list[str] = field(default_factory=list)
    """Of the controller."""


@cache
def sharded_model(path: str, plan: Plan, exact: bool) -> tuple[SuperModel, Sharded, Counts]:
    """Once for each plan: the process group stays."""
    counts = Counts()
    device = torch.device("cpu")
    mesh = shard_mesh(plan, device)
    model, sharded = load_sharded(
        BaseSpec(model=path), device, mesh, counts=counts, kept_layers=plan.kept_layers
    )
    with sharded.building():
        super_model = SuperModel(model, per_sequence=exact)
        sharded.serve(super_model)
    return super_model, sharded, counts
