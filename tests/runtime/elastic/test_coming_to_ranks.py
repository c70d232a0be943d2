"""Jobs on their way into a group of ranks: the others train on, and all ranks come to the same."""

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support import group_faults
from support.asking import Asking, answers, put, submission
from support.kills import curves, same_end
from support.runs import job_file

import tlora
from tlora.core.job import RunSpec
from tlora.core.plan import Plan
from tlora.runtime.elastic import desk
from tlora.runtime.group import supervisor
from tlora.runtime.group.running import train_in_group
from tlora.runtime.group.supervisor import Ranks
from tlora.runtime.training import RunResult

pytestmark = pytest.mark.multi_process

STEPS = {"plain": 60, "late": 20, "later": 20}
ALONE = Plan(bucket=128, replicas=2, adapters="rank_local")
SPANNING = Plan(bucket=128, replicas=2, adapters="data_parallel")
PLANS = pytest.mark.parametrize("plan", [ALONE, SPANNING], ids=["rank_local", "data_parallel"])


@pytest.fixture(scope="module")
def spec(base: Path, rows: Path) -> RunSpec:
    jobs = [{"name": name, "data": {"path": str(rows)}} for name in STEPS]
    engine = {"device": "cpu", "isolation": "exact", "nano_batch_tokens": 128}
    settings = [f"jobs.{job}.train.max_steps={steps}" for job, steps in STEPS.items()]
    return tlora.load_spec(job_file(base, *jobs, engine=engine), settings)


@pytest.fixture(scope="module")
def together(spec: RunSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("together") / "run"
    assert not tlora.train(spec, output=output).failed
    return output


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """How many things ranks are asked for before the others come to their end."""
    monkeypatch.setattr(desk, "LOOK_EVERY_S", 0.1)

    def things(count: int) -> None:
        serve = partial(group_faults.held_newcomers, words=count)
        monkeypatch.setattr(supervisor, "serve", serve)

    return things


class Person(Asking):
    """At a step of a job: asks for something, or lets somebody go on (the name of a file)."""

    def __init__(self, root: Path, asked: dict[tuple[str, int], list]) -> None:
        super().__init__(root, {})
        self._then = dict(asked)

    def on_step(self, driver, done) -> None:
        super().on_step(driver, done)
        for each in self._then.pop((done.job, done.step), []):
            if isinstance(each, str):
                (self.root / each).touch()
            else:
                put(self.root, each)


def submit(spec: RunSpec, *names: str) -> tuple[str, str, dict]:
    jobs = tuple(job for job in spec.jobs if job.name in names)
    engine = replace(spec.engine, isolation="default")
    return ("submit", "", submission(replace(spec, jobs=jobs, engine=engine)))


def train(spec: RunSpec, root: Path, plan: Plan, asked: dict) -> RunResult:
    exact = "exact" if plan is ALONE else "default"
    engine = replace(spec.engine, isolation=exact)
    first = replace(spec, jobs=spec.jobs[:1], engine=engine)
    groups: list[Ranks] = []
    result = train_in_group(
        first, output=root, plan=plan, progress=Person(root, asked), on_start=groups.append
    )
    assert len(groups) == 1, "it waits for whoever is on its way"
    return result


def statuses(result: RunResult) -> dict[str, str]:
    return {name: job.status for name, job in result.jobs.items()}


def joined(root: Path) -> list[str]:
    """Those that came later, in that order."""
    lines = map(json.loads, (root / "events.jsonl").read_text().splitlines())
    names = [each["job"] for each in lines if each["kind"] == "joined"]
    return [name for name in names if name != "plain"]


def ends(root: Path) -> list[str]:
    """As often as they were told."""
    lines = map(json.loads, (root / "events.jsonl").read_text().splitlines())
    return sorted(each["job"] for each in lines if each["kind"] == "ended")


@PLANS
def test_the_others_train_while_one_is_on_its_way(
    plan: Plan, spec: RunSpec, together: Path, tmp_path: Path, asked_for: Callable[[int], None]
) -> None:
    """Its data are held on one rank until another that was submitted with it has trained to its
    end, then its adapter until everybody has: whoever is here first comes first, and the group
    waits. Where no job spans ranks all have the bits of an undisturbed run."""
    asked_for(2)
    asked = {
        ("plain", 2): [submit(spec, "late", "later"), "later.open", "later.enter"],
        ("later", 20): ["late.open"],
        ("plain", 60): ["late.enter"],
    }
    result = train(spec, tmp_path, plan, asked)
    assert statuses(result) == dict.fromkeys(STEPS, "completed")
    assert joined(tmp_path) == ["later", "late"]
    for job in STEPS:
        if plan is ALONE:
            assert same_end(tmp_path, together, job), job
        ours, theirs = ([each[3] for each in curves(root, job)] for root in (tmp_path, together))
        assert ours == pytest.approx(theirs, rel=1e-4), job


@PLANS
@pytest.mark.parametrize("where", ["open", "enter", "spoilt"])
def test_one_that_is_cancelled_on_its_way_is_never_attached(
    where: str, plan: Plan, spec: RunSpec, tmp_path: Path, asked_for: Callable[[int], None]
) -> None:
    """On either half of it, also where the rank that was to take it in cannot read it. The others
    notice nothing."""
    asked_for(2)
    before = {"open": [], "enter": ["late.open"], "spoilt": ["late.open", "late.spoilt"]}[where]
    asked = {
        ("plain", 2): [submit(spec, "late"), *before],
        ("plain", 9): [("cancel", "late", {})],
    }
    result = train(spec, tmp_path, plan, asked)
    assert statuses(result) == {"plain": "completed", "late": "cancelled"}
    assert joined(tmp_path) == [] and result.jobs["late"].steps == 0
    assert ends(tmp_path) == ["late", "plain"]
    assert answers(tmp_path) == ["at work: late", "cancelled after 0 steps; it has not begun"]


@PLANS
@pytest.mark.parametrize(
    ("fault", "reason"),
    [("unseen", "no such file on this node (rank 1)"), ("spoilt", "a disk was pulled (rank 1)")],
)
def test_one_that_a_rank_cannot_read_fails_alone(
    fault: str,
    reason: str,
    plan: Plan,
    spec: RunSpec,
    tmp_path: Path,
    asked_for: Callable[[int], None],
) -> None:
    """Its data, whoever is to take it in; or its checkpoint. Where it spans ranks it fails on all;
    where it does not it goes to this one, which has nothing else to do."""
    asked_for(1)
    asked = {("plain", 2): [submit(spec, "late"), f"late.{fault}", "late.open", "late.enter"]}
    result = train(spec, tmp_path, plan, asked)
    assert statuses(result) == {"plain": "completed", "late": "failed"}
    assert result.jobs["late"].reason == reason
    assert joined(tmp_path) == [] and ends(tmp_path) == ["late", "plain"]


def test_one_that_ranks_see_at_other_steps_fails_alone(
    spec: RunSpec, tmp_path: Path, asked_for: Callable[[int], None]
) -> None:
    """They would train on from different adapters. Its checkpoint stays as it is."""
    asked_for(3)

    class Resumes(Person):
        def on_end(self, result) -> None:
            super().on_end(result)
            if result.status == "cancelled":
                (self.root / "late.behind").touch()
                put(self.root, ("resume", "late", {}))

    engine = replace(spec.engine, isolation="default")
    first = replace(spec, jobs=spec.jobs[:1], engine=engine)
    asked = {
        ("plain", 2): [submit(spec, "late"), "late.open", "late.enter"],
        ("late", 6): [("cancel", "late", {})],
    }
    view = Resumes(tmp_path, asked)
    result = train_in_group(first, output=tmp_path, plan=SPANNING, progress=view)
    assert statuses(result) == {"plain": "completed", "late": "failed"}
    reason = str(result.jobs["late"].reason)
    assert "ranks do not see the same of it" in reason and "rank 1 step 0" in reason
    assert list((tmp_path / "late/checkpoints").iterdir())


def test_a_group_that_is_stopped_meanwhile_takes_it_in_when_it_goes_on(
    spec: RunSpec, together: Path, tmp_path: Path, asked_for: Callable[[int], None]
) -> None:
    """To the same end."""
    asked_for(1)

    class Stops(Person):
        def on_step(self, driver, done) -> None:
            super().on_step(driver, done)
            if (done.job, done.step) == ("plain", 40):
                signal.raise_signal(signal.SIGINT)

    first = replace(spec, jobs=spec.jobs[:1])
    view = Stops(tmp_path, {("plain", 2): [submit(spec, "late")]})
    assert train_in_group(first, output=tmp_path, plan=ALONE, progress=view).interrupted
    assert joined(tmp_path) == []
    for name in ("late.open", "late.enter"):
        (tmp_path / name).touch()
    result = train(spec, tmp_path, ALONE, {})
    assert statuses(result) == {"plain": "completed", "late": "completed"}
    for job in ("plain", "late"):
        assert same_end(tmp_path, together, job), job
