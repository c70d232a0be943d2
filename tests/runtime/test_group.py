"""A run over several ranks from files to adapters, and ranks that are lost on the way."""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support import group_faults, rank_runner
from support.group_faults import lose, stop_rank
from support.runs import job_file, write_rows
from support.waiting import Stalls

from tlora.cli.main import main
from tlora.config import dump_spec, load_plan, load_spec
from tlora.core.errors import SpecError
from tlora.core.job import RunSpec
from tlora.core.plan import Plan
from tlora.runtime import report_data
from tlora.runtime.directory import RunDirectory
from tlora.runtime.group import running, supervisor
from tlora.runtime.group.choosing import fastest_plan
from tlora.runtime.group.plans import check_plan
from tlora.runtime.group.running import train_in_group
from tlora.runtime.progress import ProgressLines
from tlora.runtime.report_tables import traffic_rows
from tlora.runtime.run_log import read_run
from tlora.runtime.training import train

pytestmark = pytest.mark.multi_process

ROUNDING = 1e-5
"""Of losses, where nano-batches are cut in another way: 1.3e-7 after 24 steps and 8e-7 after 120
was the most between eight sizes of them."""

TIMES = {name: getattr(supervisor, name) for name in ("HANG_S", "GRACE_S")}
"""As they are outside of tests."""

MIXED = Plan(bucket=128, fsdp=2, kept_layers=1, adapters="mixed", spread=("long",))
LOCAL = Plan(bucket=128, replicas=2, adapters="rank_local")


@pytest.fixture(scope="module")
def spec(base: Path, rows: Path) -> RunSpec:
    data = {"path": str(rows)}
    return load_spec(
        job_file(
            base,
            {
                "name": "long",
                "data": data,
                "lora": {"r": 4, "lora_dropout": 0.1},
                "train": {"max_steps": 24, "batch_size": 5, "seed": 1},
                "eval": {"split": 4, "steps": 8},
                "save": {"steps": 2},
            },
            {"name": "short", "data": data, "train": {"max_steps": 5}, "save": {"steps": 2}},
            {"name": "other", "data": data, "train": {"max_steps": 20}, "save": {"steps": 2}},
        )
    )


@pytest.fixture(scope="module")
def alone(spec: RunSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("alone")
    train(spec, output=output)
    return output


def losses(output: Path, job: str) -> list[tuple[str, int, float]]:
    lines = (output / job / "metrics.jsonl").read_text().splitlines()
    return [(each["kind"], each["step"], each["loss"]) for each in map(json.loads, lines)]


def same_as_alone(output: Path, alone: Path, jobs: tuple[str, ...]) -> None:
    for job in jobs:
        found, expected = losses(output, job), losses(alone, job)
        assert [each[:2] for each in found] == [each[:2] for each in expected], job
        assert [each[2] for each in found] == pytest.approx(
            [each[2] for each in expected], rel=ROUNDING
        ), job


def events(output: Path, kind: str) -> list[dict]:
    found = map(json.loads, (output / "events.jsonl").read_text().splitlines())
    return [each for each in found if each["kind"] == kind]


JOBS = ("long", "short", "other")


def test_a_plan_leaves_what_one_process_leaves(spec: RunSpec, alone: Path, tmp_path: Path) -> None:
    """Two shards, a job over both ranks: metrics line by line, results, and what it cost."""
    result = train_in_group(spec, output=tmp_path, plan=MIXED)
    assert {job.status for job in result.jobs.values()} == {"completed"}
    same_as_alone(tmp_path, alone, JOBS)
    about = json.loads((tmp_path / "group.json").read_text())
    assert [each["rank"] for each in about["ranks"]] == [0, 1]
    for each in about["ranks"]:
        assert each["collectives"]["gradient"]["calls"] == 2 * 24
        assert 0 < each["utilisation"] <= 1
    page = (tmp_path / "report.html").read_text()
    assert 'id="ranks"' in page and 'id="traffic"' in page
    traffic = {row.kind: row for row in traffic_rows(read_run(tmp_path))}
    assert traffic["gradient"].calls == 48 and traffic["gradient"].seconds
    assert traffic["backbone"].num_bytes > traffic["control"].num_bytes
    drawn = report_data.placement(read_run(tmp_path))
    assert drawn is not None and [each["name"] for each in drawn] == ["rank 0", "rank 1"]
    for each in drawn:
        assert any(stay[0] == JOBS.index("long") for stay in each["stays"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("plan", "number", "cause"),
    [
        (LOCAL, signal.SIGKILL, "ended by SIGKILL"),
        (MIXED, signal.SIGSTOP, "has not been heard of"),
    ],
    ids=["killed", "stopped"],
)
def test_a_lost_rank_ends_the_group_and_the_jobs_go_on_without(
    plan: Plan,
    number: int,
    cause: str,
    spec: RunSpec,
    alone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within ten seconds, with the cause named; under a smaller plan every job ends as alone."""
    for name, seconds in TIMES.items():
        monkeypatch.setattr(supervisor, name, seconds)
    monkeypatch.setattr(supervisor, "serve", group_faults.unhurried_to_the_end)
    lost: list[float] = []
    on_start = lose(tmp_path / "long" / "metrics.jsonl", number, 1, lost)
    with Stalls() as stalls:
        result = train_in_group(spec, output=tmp_path, plan=plan, on_start=on_start)
    (event,) = events(tmp_path, "group_lost")
    assert event["cause"].startswith("rank 1: ") and cause in event["cause"]
    assert event["time"] - lost[0] < 10.0 + stalls.seconds
    assert {job.status for job in result.jobs.values()} == {"completed"}
    same_as_alone(tmp_path, alone, JOBS)


def test_a_stopped_run_goes_on_under_another_plan_with_a_job_more(
    spec: RunSpec, alone: Path, tmp_path: Path
) -> None:
    """Ctrl-C under shards; the same command with a job added goes on with whole copies. All end as
    alone: checkpoints know of no plan."""
    metrics = tmp_path / "long" / "metrics.jsonl"

    class Interrupting(ProgressLines):
        def on_step(self, driver, done) -> None:
            super().on_step(driver, done)
            if done.job == "long" and done.step == 4:
                os.kill(os.getpid(), signal.SIGINT)

    first = replace(spec, jobs=spec.jobs[:2])
    shown = Interrupting(io.StringIO())
    assert train_in_group(first, output=tmp_path, plan=MIXED, progress=shown).interrupted
    assert 4 <= len(metrics.read_text().splitlines()) < len(losses(alone, "long"))
    result = train_in_group(spec, output=tmp_path, plan=LOCAL)
    assert {job.status for job in result.jobs.values()} == {"completed"}
    same_as_alone(tmp_path, alone, JOBS)


def test_a_job_whose_data_have_changed_fails_on_all_of_its_ranks(
    base: Path, tmp_path: Path
) -> None:
    """It spans both: neither goes on with it, and the other job does on both."""
    rows = write_rows(tmp_path / "changing.jsonl", 20)
    spec = load_spec(
        job_file(
            base,
            {"name": "changed", "data": {"path": str(rows)}, "train": {"max_steps": 6}},
            {"name": "kept", "data": {"path": str(write_rows(tmp_path / "kept.jsonl", 20))}},
        )
    )

    class Interrupting(ProgressLines):
        def on_step(self, driver, done) -> None:
            if done.job == "changed" and done.step == 1:
                os.kill(os.getpid(), signal.SIGINT)

    assert train(spec, output=tmp_path / "r", progress=Interrupting(io.StringIO())).interrupted
    write_rows(rows, 20, seed=7)
    result = train_in_group(spec, output=tmp_path / "r", plan=Plan(bucket=128, replicas=2))
    assert not events(tmp_path / "r", "group_lost")
    assert result.jobs["changed"].status == "failed" and result.jobs["kept"].status == "completed"
    assert "its data have changed" in (result.jobs["changed"].reason or "")


def test_an_exception_on_one_rank_is_named(
    spec: RunSpec, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not what it did to the other."""
    monkeypatch.setattr(supervisor, "serve", group_faults.raising)
    result = train_in_group(spec, output=tmp_path, plan=LOCAL)
    (event,) = events(tmp_path, "group_lost")
    assert event["cause"] == "rank 1: OSError: a cable was pulled"
    assert {job.status for job in result.jobs.values()} == {"completed"}
    same_as_alone(tmp_path, alone, JOBS)


def one_ends_early(base: Path, rows: Path, isolation: str = "default") -> RunSpec:
    data = {"path": str(rows)}
    return load_spec(
        job_file(
            base,
            {
                "name": "early",
                "data": data,
                "train": {"max_steps": 400, "learning_rate": 3.0},
                "eval": {"split": 4, "steps": 2, "patience": 1},
            },
            {"name": "one", "data": data, "train": {"max_steps": 120}},
            {"name": "two", "data": data, "train": {"max_steps": 120, "seed": 3}},
            engine={"device": "cpu", "isolation": isolation, "nano_batch_tokens": 128},
        )
    )


@pytest.mark.parametrize("isolation", ["default", "exact"])
def test_a_rank_that_runs_dry_gets_a_job(
    isolation: str, base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job ends early and leaves its rank idle: another moves there, and ends as alone; to the
    bit where that is asked for."""
    monkeypatch.setattr(supervisor, "serve", group_faults.quick_to_move)
    spec = one_ends_early(base, rows, isolation)
    train(spec, output=tmp_path / "alone")
    result = train_in_group(spec, output=tmp_path / "group", plan=LOCAL)
    assert result.jobs["early"].status in ("stopped_early", "failed")
    # The early one has a rate at which rounding grows.
    same_as_alone(tmp_path / "group", tmp_path / "alone", ("one", "two"))
    if isolation == "exact":
        for job in ("one", "two"):
            assert losses(tmp_path / "group", job) == losses(tmp_path / "alone", job)
    (moved,) = events(tmp_path / "group", "detached")
    joined = [
        each["device"]
        for each in events(tmp_path / "group", "joined")
        if each["job"] == moved["job"]
    ]
    assert joined == [1, 0]


def test_a_job_that_moved_is_saved_when_its_group_ends(
    base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that it came from is lost: it goes on from where it was, not from its move."""
    monkeypatch.setattr(supervisor, "serve", group_faults.raising_after_a_move)
    train_in_group(one_ends_early(base, rows), output=tmp_path, plan=LOCAL)
    (moved,) = events(tmp_path, "detached")
    steps = [each["step"] for each in events(tmp_path, "joined") if each["job"] == moved["job"]]
    assert steps[:2] == [0, moved["step"]] and steps[2] > moved["step"] + 10


def test_the_size_of_nano_batches_is_tuned_where_that_is_asked_for(
    spec: RunSpec, alone: Path, tmp_path: Path
) -> None:
    """By rank 0, whose events tell how; results are as alone. Otherwise the plan's size holds."""
    engine = replace(spec.engine, nano_batch_tokens="tuned")
    plan = replace(LOCAL, bucket=1024)
    train_in_group(replace(spec, engine=engine), output=tmp_path, plan=plan)
    same_as_alone(tmp_path, alone, JOBS)
    (tuning,) = events(tmp_path, "tuning")
    assert tuning["settings"]["start"] == 256
    measured = [each for each in events(tmp_path, "nano_batch") if "measure" in each]
    assert measured and {each["device"] for each in measured} == {0}


def torchrun(
    spec: RunSpec, folder: Path, *options: str, restarts: int = 0, program: str = "-m tlora"
) -> list[str]:
    """The documented command, unless it is to start another program."""
    (folder / "jobs.yaml").write_text(dump_spec(spec))
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--max-restarts", str(restarts), *program.split(), "train", str(folder / "jobs.yaml")),
        *("--output", str(folder / "run"), *options),
    ]


def test_torchrun_starts_the_ranks_too(spec: RunSpec, alone: Path, tmp_path: Path) -> None:
    """Without a plan by the planner's: the same files, events of all ranks among them; the plan is
    said once. A job that fails is told by the exit code, and no reason to train anything again."""
    train_badly = replace(spec.jobs[1].train, learning_rate=1e30)
    bad = replace(spec.jobs[1], name="bad", train=train_badly)
    command = torchrun(replace(spec, jobs=(*spec.jobs, bad)), tmp_path, restarts=1)
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("plan: one group, ") == 1
    assert done.stderr.count("failed: bad; the reasons are in") == 2
    run = tmp_path / "run"
    assert len(events(run, "began")) == 1
    assert [each["status"] for each in events(run, "ended") if each["job"] == "bad"] == ["failed"]
    same_as_alone(run, alone, JOBS)
    assert {each["device"] for each in events(run, "nano_batch")} == {0, 1}
    times = [each["time"] for each in events(run, "nano_batch")]
    assert times == sorted(times)


def test_a_second_torchrun_hears_who_is_at_work(spec: RunSpec, tmp_path: Path) -> None:
    """In one line, once for all ranks and all attempts."""
    (tmp_path / "plan.yaml").write_text("replicas: 2\nbucket: 128\nadapters: rank_local\n")
    (tmp_path / "run").mkdir()
    here = RunDirectory(tmp_path / "run")
    here.take()
    command = torchrun(spec, tmp_path, "--plan", str(tmp_path / "plan.yaml"), restarts=1)
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    here.close()
    assert done.returncode == 1, done.stderr
    assert done.stderr.count(f"another tlora is at work in {tmp_path / 'run'} (process") == 1
    assert f"(process {os.getpid()} on " in done.stderr and "[rank" not in done.stderr


def test_a_hanging_rank_of_torchrun_is_named_and_replaced(
    spec: RunSpec, alone: Path, tmp_path: Path
) -> None:
    """A stopped rank ends the group within ten seconds; torchrun starts it again, and every job
    ends as alone."""
    (tmp_path / "plan.yaml").write_text("replicas: 2\nbucket: 128\nadapters: rank_local\n")
    plan = ("--plan", str(tmp_path / "plan.yaml"))
    command = torchrun(spec, tmp_path, *plan, restarts=1, program=rank_runner.__file__)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as group:
        try:
            stopped = stop_rank(1, group.pid, when=tmp_path / "run" / "long" / "metrics.jsonl")
            with Stalls() as stalls:
                _, errors = group.communicate(timeout=600)
        finally:
            group.terminate()
    assert group.returncode == 0, errors
    (event, *_) = events(tmp_path / "run", "group_lost")
    assert event["cause"].startswith("rank 1: it has not been heard of for ")
    assert event["time"] - stopped < 10.0 + stalls.seconds
    assert event["cause"] in errors
    same_as_alone(tmp_path / "run", alone, JOBS)


def without_ranks(monkeypatch: pytest.MonkeyPatch, *losses: supervisor.Loss) -> None:
    """No process is started: groups are lost in this order, and the last one ends well."""
    ends = [*losses, None]

    class NoRanks:
        def __init__(self, *about, **settings) -> None:
            pass

        def watch(self, hear, should_stop, asked) -> supervisor.Loss | None:
            return ends.pop(0)

        def close(self) -> None:
            pass

    monkeypatch.setattr(running, "Ranks", NoRanks)


def test_after_a_loss_the_plan_on_record_is_the_one_that_runs(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In run.json, group.json and the report; the lost one stands with its cause."""
    without_ranks(monkeypatch, supervisor.Loss(1, "a cable was pulled"))
    train_in_group(spec, output=tmp_path, plan=MIXED)
    group = json.loads((tmp_path / "group.json").read_text())
    about = json.loads((tmp_path / "run.json").read_text())
    now = load_plan(group["plan"])
    assert now.gpus == 1 and about["plan"] == group["plan"] and about["devices"] == 1
    (lost,) = group["lost"]
    assert load_plan(lost["plan"]) == MIXED and lost["cause"] == "rank 1: a cable was pulled"
    assert f'<td id="plan">{now}</td>' in (tmp_path / "report.html").read_text()


def test_exact_jobs_do_not_go_on_in_a_group_of_another_kind_of_machine(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was shown at the start is on record, and compared before anything is written."""
    without_ranks(monkeypatch)
    exact = replace(spec, engine=replace(spec.engine, isolation="exact", nano_batch_tokens=64))
    train_in_group(exact, output=tmp_path, plan=LOCAL)
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["exact"]["num_rows"] == 64
    without_ranks(monkeypatch)
    train_in_group(exact, output=tmp_path, plan=LOCAL)
    (tmp_path / "run.json").write_text(json.dumps(about | {"device": "another"}))
    with pytest.raises(SpecError, match="was started with device another"):
        train_in_group(exact, output=tmp_path, plan=LOCAL)
    assert json.loads((tmp_path / "run.json").read_text())["device"] == "another"


def test_a_plan_that_names_no_job_is_refused(spec: RunSpec) -> None:
    """Before anything is loaded."""
    with pytest.raises(SpecError, match="nobody"):
        check_plan(Plan(bucket=64, replicas=2, adapters="mixed", spread=("nobody",)), spec)


def test_the_fastest_plan_is_chosen_and_said(spec: RunSpec) -> None:
    """For two devices one that can run, with its prediction; all ranks where they were started."""
    way = fastest_plan(spec, 2, use_all=True)
    assert way.plan is not None and way.plan.is_executed and way.plan.gpus == 2
    assert f"plan: one group, {way.plan}: about " in way.sentence
    check_plan(way.plan, spec, world=2)


def test_auto_is_for_several_devices(spec: RunSpec, tmp_path: Path) -> None:
    """For one there is nothing to choose."""
    (tmp_path / "jobs.yaml").write_text(dump_spec(spec))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "jobs.yaml"), "--plan", "auto"])
    assert ended.value.code == 2
