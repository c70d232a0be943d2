"""What a run is asked before its ranks have begun: by a person while nothing runs, or while a group
that was lost is followed by another one. No process is started here."""

import io
import json
import math
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.asking import answers, put, submission
from support.runs import job_file
from support.waiting import until

from tlora.config import dump_spec, load_spec
from tlora.core.errors import SpecError
from tlora.core.job import RunSpec
from tlora.core.plan import Plan
from tlora.costs.plans import PlanPrice
from tlora.data.prepare import PreparedData, Preparer
from tlora.model.loading import load_shape, load_tokenizer
from tlora.model.targets import find_targets
from tlora.parallel.counting import Counts
from tlora.runtime.checking import prepare_jobs
from tlora.runtime.directory import RunDirectory
from tlora.runtime.elastic.roll import Again, enrol
from tlora.runtime.executors.messages import Ended, GiveUp, encoded
from tlora.runtime.executors.worker import no_result
from tlora.runtime.group import as_rank, rank, running
from tlora.runtime.group.choosing import fastest_plan
from tlora.runtime.group.coming import Account, Coming, Newcomers, Opened, common_problem
from tlora.runtime.group.floor import GroupFloor
from tlora.runtime.group.rank import Member
from tlora.runtime.group.running import train_in_group
from tlora.runtime.group.whole import Whole
from tlora.runtime.progress import ProgressLines
from tlora.runtime.resuming import Resumption
from tlora.runtime.scheduled import Lead
from tlora.runtime.training import RunResult

LOCAL = Plan(bucket=128, replicas=2, adapters="rank_local")


@pytest.fixture
def spec(base: Path, rows: Path) -> RunSpec:
    data = {"path": str(rows)}
    jobs = [{"name": name, "data": data, "train": {"max_steps": 4}} for name in ("one", "two")]
    return load_spec(job_file(base, *jobs, engine={"device": "cpu"}))


def end(root: Path, spec: RunSpec, status: str) -> None:
    """All jobs are over, as an earlier run leaves them."""
    for job in spec.jobs:
        result = {"v": 1, **asdict(replace(no_result(job.name, ""), status=status))}
        (root / job.name).mkdir(parents=True, exist_ok=True)
        (root / job.name / "result.json").write_text(json.dumps(result))


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The jobs of each group, and what it is asked at once."""
    seen: list[list[str]] = []

    class NoRanks:
        def __init__(self, plan, root, jobs, **settings) -> None:
            self.jobs = jobs

        def watch(self, hear, should_stop, commands) -> None:
            seen.append([*self.jobs, *(f"-{each.job}" for each in commands())])

        def close(self) -> None:
            pass

    monkeypatch.setattr(running, "Ranks", NoRanks)
    return seen


def test_a_job_that_is_to_leave_does_not_come_first(
    spec: RunSpec, tmp_path: Path, begun: list[list[str]]
) -> None:
    """It may be the one that no rank has room for."""
    put(tmp_path, ("cancel", "two", {}))
    result = train_in_group(spec, output=tmp_path, plan=LOCAL)
    assert begun == [["one"]]
    assert result.jobs["two"].status == "cancelled"
    assert answers(tmp_path) == ["cancelled after 0 steps; it has not begun"]


def test_a_job_whose_adapter_cannot_be_exported_leaves_from_its_rank(
    spec: RunSpec, tmp_path: Path, begun: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost: it comes, and goes at once."""

    def full(*about) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Lead, "cancelled", full)
    put(tmp_path, ("cancel", "two", {}))
    train_in_group(spec, output=tmp_path, plan=LOCAL)
    assert begun == [["one", "two", "-two"]]


def alone(monkeypatch: pytest.MonkeyPatch, run_rank: Callable[..., object]) -> None:
    """One rank after another: nobody waits for the others."""
    monkeypatch.setattr(as_rank, "run_rank", run_rank)
    monkeypatch.setattr(as_rank, "tell_all", lambda said: said)
    monkeypatch.setattr(dist, "barrier", lambda: None)


def started_outside(spec: RunSpec, root: Path, number: int) -> RunResult:
    """A rank of a group that somebody else has started; the others come after it."""
    progress = ProgressLines(io.StringIO())
    whole = Whole(spec, LOCAL, root, progress, leads=number == 0)
    return as_rank.train_together(whole, number, fresh=False, again=Again())


def test_ranks_from_outside_take_up_what_was_asked_while_nothing_ran(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All jobs are over, and one was submitted: every rank trains it, and knows how it ended."""
    first, second = (replace(spec, jobs=(job,)) for job in spec.jobs)
    end(tmp_path, first, "completed")
    put(tmp_path, ("submit", "", submission(second)))
    trained: list[list[str]] = []
    alone(monkeypatch, lambda root, plan, jobs, *_, **__: trained.append(jobs))
    for number in (0, 1):
        started_outside(first, tmp_path, number)
    assert trained == [["two"], ["two"]]
    assert answers(tmp_path) == ["at work: two"]
    end(tmp_path, second, "failed")
    assert started_outside(first, tmp_path, 1).failed == ["two"]


@pytest.mark.parametrize("number", [0, 1])
def test_ranks_from_outside_are_refused_together(
    number: int, spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 says who is at work there; the others do not wait for it until they are lost."""
    alone(monkeypatch, lambda *_, **__: pytest.fail("it trains"))
    monkeypatch.setattr(as_rank, "tell_all", lambda said: True)
    other = RunDirectory(tmp_path)
    other.take()
    with pytest.raises(SpecError if number == 0 else as_rank.RefusedByRank0) as refused:
        started_outside(spec, tmp_path, number)
    assert ("another tlora is at work" in str(refused.value)) == (number == 0)
    other.close()


def test_a_rank_that_does_not_lead_knows_of_jobs_that_joined_meanwhile(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exit code is that of the others."""
    first, second = (replace(spec, jobs=(job,)) for job in spec.jobs)

    def run_rank(root, plan, jobs, *_, **__) -> None:
        enrol(root, first, second.jobs)
        end(root, first, "completed")
        end(root, second, "failed")

    alone(monkeypatch, run_rank)
    assert started_outside(first, tmp_path, 1).failed == ["two"]


def test_a_plan_is_chosen_for_jobs_that_are_over_too(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may have asked for one of them again; nothing is said of it, and nothing refused
    where nothing fits."""
    expected = fastest_plan(spec, 2, use_all=True)
    root = tmp_path / "run"
    end(root, spec, "completed")
    found = fastest_plan(spec, 2, use_all=True, output=root)
    assert found.plan == expected.plan and found.sentence == ""
    monkeypatch.setattr(PlanPrice, "fits", False)
    with pytest.raises(SpecError, match="nothing fits"):
        fastest_plan(spec, 2, use_all=True)
    found = fastest_plan(spec, 2, use_all=True, output=root)
    assert found.plan is not None and found.plan.gpus == 2


def test_ranks_from_outside_train_what_came_as_they_ended(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody heard of it in the last turn: it is not left for the next start."""
    first, second = (replace(spec, jobs=(job,)) for job in spec.jobs)
    trained: list[list[str]] = []

    def run_rank(root, plan, jobs, *_, **__) -> None:
        trained.append(jobs)
        end(root, first if jobs == ["one"] else second, "completed")
        if jobs == ["one"]:
            put(root, ("submit", "", submission(second)))

    alone(monkeypatch, run_rank)
    result = started_outside(first, tmp_path, 0)
    assert trained == [["one"], ["two"]] and answers(tmp_path) == ["at work: two"]
    assert not result.interrupted and result.jobs["two"].status == "completed"


def test_a_group_that_is_refused_leaves_the_files_of_whoever_is_at_work(
    spec: RunSpec, tmp_path: Path, begun: list[list[str]]
) -> None:
    """What that group has recorded is its own."""
    train_in_group(spec, output=tmp_path, plan=LOCAL)
    before = (tmp_path / "group.json").read_text()
    other = RunDirectory(tmp_path)
    other.take()
    wider = replace(LOCAL, replicas=3)
    with pytest.raises(SpecError, match=rf"another tlora is at work .* \(process {os.getpid()} "):
        train_in_group(spec, output=tmp_path, plan=wider)
    other.close()
    assert (tmp_path / "group.json").read_text() == before


def member(spec: RunSpec, root: Path, plan: Plan) -> tuple[Member, list[str], list[str]]:
    """A rank without an engine: what has ended on it, and what was detached."""
    ended: list[str] = []
    detached: list[str] = []
    found = Member.__new__(Member)
    found.rank, found.world, found.plan = 0, 1, plan
    found.counts = Counts()
    found.specs = {job.name: job for job in spec.jobs}
    found.data = prepare_jobs(spec, limit=None)
    found._preparer = Preparer(load_tokenizer(spec.base), cache_dir=root)
    found.model = None  # type: ignore[assignment]
    found.engine = SimpleNamespace(jobs=["one"], detach=detached.append)  # type: ignore[assignment]
    found.recorder = SimpleNamespace(  # type: ignore[assignment]
        on_end=lambda driver: ended.append(f"{driver.name} {driver.status.value}: {driver.reason}")
    )
    return found, ended, detached


@pytest.mark.parametrize("job", ["one", "two"])
def test_a_job_without_room_fails_alone(
    job: str, spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attached or not yet; a smaller plan would have less room. One that spans ranks takes the
    group with it, for the others may have found room."""

    def full(*_) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(rank, "adapter_start", lambda *_: {})
    monkeypatch.setattr(rank, "enter_job", full)
    here, ended, detached = member(spec, tmp_path, LOCAL)
    assert here._enter(job, Resumption()) is None
    assert ended == [f"{job} failed: out of memory: no room"]
    assert detached == (["one"] if job == "one" else [])
    everywhere, ended, _ = member(spec, tmp_path, replace(LOCAL, adapters="data_parallel"))
    with pytest.raises(torch.OutOfMemoryError):
        everywhere._enter(job, Resumption())
    assert ended == []


@pytest.mark.parametrize("text", ["", "jobs: ["])
def test_a_job_that_a_node_does_not_see_fails_alone(
    text: str, spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its resolved.yaml may be older there, or not whole."""
    (tmp_path / "resolved.yaml").write_text(text or dump_spec(replace(spec, jobs=spec.jobs[:1])))
    monkeypatch.setattr(rank, "exchange", lambda text, **_: [text])
    here, _, _ = member(spec, tmp_path, LOCAL)
    told: list[object] = []
    here.directory = RunDirectory(tmp_path)  # type: ignore[assignment]
    here.tell = told.append
    here._newcomers = Newcomers(tmp_path, here._preparer)
    here._newcomers.begin("two")
    coming = here._newcomers.of("two")
    until(lambda: coming.is_here)
    here._go_on_with(SimpleNamespace(active={}), coming)  # type: ignore[arg-type]
    (message,) = told
    assert isinstance(message, Ended)
    assert message.job == "two" and "resolved.yaml" in message.result["reason"]
    assert not here._newcomers


@pytest.mark.parametrize(
    ("accounts", "problem"),
    [
        ([("", "step 6"), ("", "step 6")], ""),
        ([("", "step 6"), ("gone (rank 1)", "")], "gone (rank 1)"),
        (
            [("", "step 6"), ("", "step 0")],
            "ranks do not see the same of it: rank 0 step 6, rank 1 step 0; ask for it again",
        ),
    ],
)
def test_a_job_comes_where_all_ranks_see_the_same_of_it(accounts, problem) -> None:
    assert common_problem([Account(*each) for each in accounts]) == problem


def test_what_is_held_out_must_be_the_same_on_all_ranks_too(spec: RunSpec) -> None:
    def opened(key: str) -> Coming:
        future: Future[Opened] = Future()
        data = PreparedData(train=[], evaluation=None, report=None, key=key)  # type: ignore[arg-type]
        future.set_result(Opened(spec.jobs[0], data))
        return Coming("one", future)

    train, held_out = "a" * 64, "b" * 64
    same = [opened(f"{train}:{held_out}").account(rank) for rank in (0, 1)]
    assert common_problem(same) == ""
    other = opened(f"{train}:{'c' * 64}").account(1)
    assert common_problem([same[0], other]).startswith(
        "ranks do not see the same of it: rank 0 data"
    )


def test_ranks_open_data_as_they_are_now(spec: RunSpec, tmp_path: Path) -> None:
    """Not as they were when another job was opened on the same file."""
    rows = tmp_path / "rows.jsonl"
    lines = Path(spec.jobs[0].data.paths[0]).read_text().splitlines()
    rows.write_text("\n".join(lines[:4]) + "\n")
    jobs = tuple(replace(job, data=replace(job.data, path=str(rows))) for job in spec.jobs)
    (tmp_path / "resolved.yaml").write_text(dump_spec(replace(spec, jobs=jobs)))
    preparer = Preparer(load_tokenizer(spec.base), cache_dir=tmp_path / "cache")
    newcomers = Newcomers(tmp_path, preparer)
    assert len(newcomers._open("one").data.train) == 4
    assert len(preparer.prepare(jobs[0]).train) == 4
    rows.write_text("\n".join(lines[:9]) + "\n")
    assert len(newcomers._open("two").data.train) == 9


def test_those_on_their_way_count_where_they_are_to_live(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two equal newcomers the first goes to the rank without work, the second to the other one,
    which has half as much to do as the first."""
    (tmp_path / "resolved.yaml").write_text(dump_spec(spec))
    here, _, _ = member(spec, tmp_path, LOCAL)
    here.rank, here.world = 1, 2
    here.model = SimpleNamespace(targets=find_targets(load_shape(spec.base)))  # type: ignore[assignment]
    here.directory = RunDirectory(tmp_path)  # type: ignore[assignment]
    here.recorder = SimpleNamespace(data_keys={})  # type: ignore[assignment]
    here._newcomers = Newcomers(tmp_path, here._preparer)
    work = here._load("one", 0)
    busy = [["busy", work.tokens / 2, work.rank]]

    def told(text: str, **_) -> list[str]:
        account, _ = json.loads(text)
        return [json.dumps([account, busy]), text]

    monkeypatch.setattr(rank, "exchange", told)
    monkeypatch.setattr(rank, "Arrival", lambda job, *_: f"arrival of {job.name}")
    places = []
    for name in ("one", "two"):
        here._newcomers.begin(name)
        coming = here._newcomers.of(name)
        until(lambda coming=coming: coming.is_here)
        here._go_on_with(SimpleNamespace(active={}), coming)  # type: ignore[arg-type]
        places.append(coming.arrival)
    assert places == ["arrival of one", None]


def test_jobs_are_dealt_anew_after_what_was_asked_at_the_same_turn(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that asked for it would not ask again, for its job has ended."""
    here, _, _ = member(spec, tmp_path, LOCAL)
    here.rank, here.world, here._asked = 1, 2, []
    here.engine = SimpleNamespace(drain=list)  # type: ignore[assignment]
    here._newcomers = Newcomers(tmp_path, here._preparer)
    here._entering_s = math.inf
    balanced: list[object] = []
    monkeypatch.setattr(here, "_balance", lambda *_, **__: balanced.append(_))
    monkeypatch.setattr(here, "_give_up", lambda *_: None)
    loop = SimpleNamespace(active={}, tell=lambda outcome: None)
    for commands, put_off in (([GiveUp("x", "a person", "cancelled")], True), ([], False)):
        here._put_off = False
        asked = json.dumps([0.0, [], encoded(commands).decode()])
        monkeypatch.setattr(rank, "exchange", lambda text, asked=asked, **_: [asked, text])
        here._meet(loop)  # type: ignore[arg-type]
        assert here._put_off == put_off and len(balanced) == (not put_off)


@pytest.mark.parametrize(("unfinished", "stops"), [(["one"], False), ([], True)])
def test_nobody_waits_for_data_where_ranks_have_work_or_somebody_stops(unfinished, stops) -> None:
    """They come later, or when the run goes on. Where there is nothing else to do they are waited
    for."""
    looks: list[float] = []
    desk = SimpleNamespace(
        is_preparing=True,
        admitted=0,
        ended=None,
        begin_again=lambda: None,
        serve=lambda *_, **__: None,
        wait=looks.append,
    )
    floor = GroupFloor(SimpleNamespace(unfinished=unfinished), desk, {})  # type: ignore[arg-type]
    floor.begin(lambda: stops)
    assert looks == []
    assert not floor.was_asked_for_more(lambda: True)
    assert looks == []

    def last_look(seconds: float) -> None:
        looks.append(seconds)
        desk.is_preparing = len(looks) < 3

    desk.wait = last_look
    floor.was_asked_for_more(lambda: False)
    assert len(looks) == 3
