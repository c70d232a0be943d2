"""A run that is stopped goes on with the same command, as if it had not been."""

import collections
import io
import json
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from support.kills import adapter_bytes, carry_out, curves, same_end
from support.runs import job_file

import tlora
from tlora.core.errors import SpecError
from tlora.runtime.directory import RunDirectory
from tlora.runtime.progress import ProgressLines
from tlora.runtime.sinks import Sinks
from tlora.training.checkpoint import checkpoints, find_newest

STEPS = 24
KILLS = int(os.environ.get("TLORA_KILLS", "10"))
"""`make kills` sets a hundred."""


def spec_of(base: Path, rows: Path, *, isolation: str = "exact", **settings: object) -> dict:
    """Three jobs that differ, saved every third step, evaluated every fifth."""
    data = {"path": str(rows)}
    file = job_file(
        base,
        {"name": "plain", "data": data, "lora": {"lora_dropout": 0.2}, "eval": {"split": 4}},
        {"name": "wide", "data": data, "lora": {"r": 8}, "train": {"batch_size": 5}},
        {"name": "single", "data": data, "train": {"batch_size": 1, "seed": 3}},
    )
    file["defaults"]["train"]["max_steps"] = STEPS
    file["defaults"]["save"] = {"steps": 3}
    file["defaults"]["eval"] = {"steps": 5}
    file["engine"] = {"device": "cpu", "isolation": isolation, "nano_batch_tokens": 128}
    return {**file, **settings}


JOBS = ("plain", "wide", "single")


@pytest.fixture(scope="module")
def undisturbed(base, rows, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    assert not tlora.train(tlora.load_spec(spec_of(base, rows)), output=output).failed
    return output


class StopAfter(ProgressLines):
    """A person who presses Ctrl-C after some nano-batches."""

    def __init__(self, nano_batches: int) -> None:
        super().__init__(out=io.StringIO())
        self.left = nano_batches

    def on_nano_batch(self, outcome) -> None:
        super().on_nano_batch(outcome)
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_saves_and_the_same_command_goes_on(base, rows, tmp_path, undisturbed):
    """Interrupted three times; curves, and with exact isolation adapters, are to the bit those of
    the undisturbed run, and nothing is logged twice."""
    spec = tlora.load_spec(spec_of(base, rows))
    output = tmp_path / "run"
    for nano_batches in (5, 11, 3):
        result = tlora.train(spec, output=output, progress=StopAfter(nano_batches))
        assert result.interrupted
    result = tlora.train(spec, output=output)
    assert not result.interrupted and not result.failed
    for job in JOBS:
        assert curves(output, job) == curves(undisturbed, job)
        assert adapter_bytes(output, job) == adapter_bytes(undisturbed, job)


def test_a_finished_run_is_left_as_it_is(base, rows, undisturbed):
    """The same command once more trains nothing and reports the old results."""
    before = {job: adapter_bytes(undisturbed, job) for job in JOBS}
    result = tlora.train(tlora.load_spec(spec_of(base, rows)), output=undisturbed)
    assert {job: result.jobs[job].status for job in JOBS} == dict.fromkeys(JOBS, "completed")
    assert {job: adapter_bytes(undisturbed, job) for job in JOBS} == before


def test_a_damaged_checkpoint_is_passed_over_with_a_word(base, rows, tmp_path, undisturbed, capsys):
    """The one before it is used, and the end is the same."""
    spec = tlora.load_spec(spec_of(base, rows))
    output = tmp_path / "run"
    tlora.train(spec, output=output, progress=StopAfter(12))
    newest = checkpoints(output / "single" / "checkpoints")[-1]
    file = newest / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    tlora.train(spec, output=output)
    assert f"{newest.name}/optimizer.safetensors" in capsys.readouterr().out
    for job in JOBS:
        assert curves(output, job) == curves(undisturbed, job)
        assert adapter_bytes(output, job) == adapter_bytes(undisturbed, job)


def test_a_changed_setting_of_a_started_job_is_refused_by_name(base, rows, undisturbed):
    """Job and field are named; the run stays as it is."""
    spec = tlora.load_spec(spec_of(base, rows), ["jobs.wide.train.learning_rate=0.5"])
    with pytest.raises(SpecError) as caught:
        tlora.train(spec, output=undisturbed)
    assert (caught.value.job, caught.value.field) == ("wide", "train.learning_rate")


def test_settings_that_decide_bits_are_fixed_under_exact_isolation(base, rows, undisturbed):
    """The size of nano-batches, and exactness itself."""
    for override, field in (
        ("engine.nano_batch_tokens=256", "engine.nano_batch_tokens"),
        ("engine.isolation=default", "engine.isolation"),
    ):
        with pytest.raises(SpecError) as caught:
            tlora.train(tlora.load_spec(spec_of(base, rows), [override]), output=undisturbed)
        assert caught.value.field == field


def test_new_jobs_may_be_added_to_a_run(base, rows, tmp_path):
    """The old ones are not trained again."""
    first = tlora.load_spec(spec_of(base, rows))
    output = tmp_path / "run"
    tlora.train(replace(first, jobs=first.jobs[:1]), output=output)
    before = (output / "plain" / "metrics.jsonl").read_bytes()
    result = tlora.train(first, output=output)
    assert set(result.jobs) == set(JOBS) and not result.failed
    assert (output / "plain" / "metrics.jsonl").read_bytes() == before


def test_a_job_left_out_for_a_while_keeps_its_settings(base, rows, tmp_path):
    """It cannot come back under other ones unnoticed."""
    whole = tlora.load_spec(spec_of(base, rows))
    output = tmp_path / "run"
    tlora.train(whole, output=output)
    tlora.train(replace(whole, jobs=whole.jobs[:1]), output=output)
    with pytest.raises(SpecError) as caught:
        tlora.train(tlora.load_spec(spec_of(base, rows), ["jobs.wide.lora.r=4"]), output=output)
    assert (caught.value.job, caught.value.field) == ("wide", "lora.r")


def test_changed_data_fail_the_job_they_belong_to_alone(base, rows, tmp_path, undisturbed):
    """As many rows, another word in one of them; the others go on to the same end."""
    own = tmp_path / "own.jsonl"
    own.write_bytes(rows.read_bytes())
    file = spec_of(base, rows)
    file["jobs"][2]["data"] = {"path": str(own)}
    output = tmp_path / "run"
    tlora.train(tlora.load_spec(file), output=output, progress=StopAfter(8))
    own.write_text(own.read_text().replace("is", "be", 1))
    result = tlora.train(tlora.load_spec(file), output=output)
    assert result.failed == ["single"]
    assert "data have changed" in (result.jobs["single"].reason or "")
    for job in ("plain", "wide"):
        assert adapter_bytes(output, job) == adapter_bytes(undisturbed, job)


def test_a_finished_job_without_its_adapter_is_done_again(base, rows, tmp_path):
    """A result is believed only while there is something to show for it."""
    spec = tlora.load_spec(spec_of(base, rows))
    spec = replace(spec, jobs=spec.jobs[2:])
    output = tmp_path / "run"
    tlora.train(spec, output=output)
    before = adapter_bytes(output, "single")
    (output / "single" / "adapter" / "adapter_model.safetensors").unlink()
    assert not tlora.train(spec, output=output).failed
    assert adapter_bytes(output, "single") == before


def test_a_full_disk_pauses_the_job_that_cannot_be_saved(base, rows, tmp_path, undisturbed):
    """A real write error: files larger than a limit. The small job's checkpoints pass, the large
    one's do not; it pauses with the reason, the other completes, and with room again it goes on to
    the same end."""
    spec = tlora.load_spec(spec_of(base, rows))
    spec = replace(spec, jobs=tuple(job for job in spec.jobs if job.name != "plain"))
    output = tmp_path / "run"
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Rank 8 needs 4 times the bytes of rank 2: a limit between the two.
    largest = max(p.stat().st_size for p in undisturbed.glob("single/checkpoints/*/*"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * largest, hard))
    try:
        result = tlora.train(spec, output=output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert result.jobs["wide"].status == "paused"
    assert "cannot save a checkpoint" in (result.jobs["wide"].reason or "")
    assert result.jobs["single"].status == "completed"
    assert result.failed == ["wide"]
    assert tlora.train(spec, output=output).jobs["wide"].status == "completed"
    assert adapter_bytes(output, "wide") == adapter_bytes(undisturbed, "wide")


@pytest.mark.multi_process
def test_kills_at_any_moment_change_nothing(base, rows, tmp_path, undisturbed):
    """SIGKILL at seeded moments, from before the first step to the last, ten to a run: the same
    curves and the same bits, and not those of a run with another seed."""
    outcomes: list[dict] = []
    compared = 0
    while (left := KILLS - sum(outcome["killed"] for outcome in outcomes)) > 0:
        seed = len(outcomes) + 1
        killing = {"kills": min(10, left), "seed": seed, "nano_batches": 14}
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcomes.append(carry_out(folder, {"run": spec_of(base, rows)}, run=killing)["run"])
        for job in JOBS:
            assert same_end(folder / "run", undisturbed, job), (seed, job)
            compared += 1
    print(json.dumps(kill_figures(outcomes, compared), indent=2))
    assert not same_end(tmp_path / "1" / "run", other_seed(base, rows, tmp_path), "single")


def kill_figures(outcomes: list[dict], compared: int) -> dict[str, object]:
    """What `make kills` shows: after how many kills the jobs were found in which state."""
    found = [
        state.split()[0] for each in outcomes for life in each["found"] for state in life.values()
    ]
    steps = {state for each in outcomes for life in each["found"] for state in life.values()}
    return {
        "kills": sum(outcome["killed"] for outcome in outcomes),
        "runs": len(outcomes),
        "jobs found at": dict(collections.Counter(found)),
        "different steps": len(steps - {"start", "over"}),
        "kills that tore a checkpoint": sum(outcome["torn"] for outcome in outcomes),
        "jobs compared, curve and adapter": compared,
        "seconds": round(sum(outcome["seconds"] for outcome in outcomes)),
    }


def other_seed(base: Path, rows: Path, tmp_path: Path) -> Path:
    """The comparison's broken twin."""
    spec = tlora.load_spec(spec_of(base, rows), ["jobs.single.train.seed=4"])
    spec = replace(spec, jobs=spec.jobs[2:])
    tlora.train(spec, output=tmp_path / "other")
    return tmp_path / "other"


class Breaks(ProgressLines):
    """A view with a mistake: at a step of a job, before or after others were told of theirs."""

    def __init__(self, job: str, step: int) -> None:
        super().__init__(out=io.StringIO())
        self.at = (job, step)

    def on_step(self, driver, done) -> None:
        super().on_step(driver, done)
        if (done.job, done.step) == self.at:
            raise RuntimeError("a mistake in the view")


@pytest.mark.parametrize("job", ["plain", "single"])
def test_an_unexpected_error_saves_what_is_whole(job, base, rows, tmp_path, undisturbed):
    """It goes on to whoever called; the job is saved at the step where it broke, no checkpoint is
    torn, and the same command goes on to the same end."""
    spec = tlora.load_spec(spec_of(base, rows))
    output = tmp_path / "run"
    for step in (5, 10):
        with pytest.raises(RuntimeError, match="a mistake in the view"):
            tlora.train(spec, output=output, progress=Breaks(job, step))
        found = {name: find_newest(output / name / "checkpoints") for name in JOBS}
        assert found[job].checkpoint is not None and found[job].checkpoint.state.step == step
        assert not any(each.damaged for each in found.values())
        for each in found.values():
            if each.checkpoint is not None:
                assert each.checkpoint.progress["step"] == each.checkpoint.state.step
    assert not tlora.train(spec, output=output).failed
    for name in JOBS:
        assert same_end(output, undisturbed, name)


def test_an_error_while_recording_a_step_leaves_that_step_unsaved(
    base, rows, tmp_path, undisturbed, monkeypatch
):
    """Its metrics would lack a line: the job goes back to its last whole checkpoint instead."""
    spec = tlora.load_spec(spec_of(base, rows))
    output = tmp_path / "run"
    log = Sinks.log

    def break_once(self, job, step, kind, values):
        if (job, step) == ("wide", 5):
            raise RuntimeError("a mistake in a tracker")
        log(self, job, step, kind, values)

    with monkeypatch.context() as patch:
        patch.setattr(Sinks, "log", break_once)
        with pytest.raises(RuntimeError, match="a mistake in a tracker"):
            tlora.train(spec, output=output)
    checkpoint = find_newest(output / "wide" / "checkpoints").checkpoint
    assert checkpoint is not None and checkpoint.state.step == 3
    assert not tlora.train(spec, output=output).failed
    for name in JOBS:
        assert same_end(output, undisturbed, name)


def test_a_disk_too_full_for_a_result_stops_nobody_else(base, rows, tmp_path, monkeypatch, capsys):
    """The job's last words are said instead; the others complete."""
    spec = tlora.load_spec(spec_of(base, rows))
    write = RunDirectory.write_result

    def full(self: RunDirectory, result) -> None:
        if result.job == "single":
            raise OSError(28, "No space left on device")
        write(self, result)

    monkeypatch.setattr(RunDirectory, "write_result", full)
    result = tlora.train(spec, output=tmp_path / "run")
    assert {job: result.jobs[job].status for job in JOBS} == dict.fromkeys(JOBS, "completed")
    assert "single: its result.json cannot be written" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["device", "torch", "tiled", "adapters", "frozen"])
def test_an_exact_run_does_not_go_on_where_its_bits_may_differ(base, rows, tmp_path, what):
    """Another device, build or set of tiles than it was started with is named."""
    spec = tlora.load_spec(spec_of(base, rows))
    output = tmp_path / "run"
    tlora.train(spec, output=output, progress=StopAfter(5))
    about = json.loads((output / "run.json").read_text())
    changes = {
        "device": {"device": "another GPU"},
        "torch": {"versions": {**about["versions"], "torch": "1.0"}},
        "tiled": {"exact": {**about["exact"], "tiled": ["48 to 48"]}},
        "adapters": {"exact": {**about["exact"], "adapters": "another library"}},
        "frozen": {"exact": {**about["exact"], "frozen": "another library"}},
    }
    (output / "run.json").write_text(json.dumps({**about, **changes[what]}))
    with pytest.raises(SpecError, match="may give other bits") as caught:
        tlora.train(spec, output=output)
    assert caught.value.field == "engine.isolation"
    (output / "run.json").write_text(json.dumps(about))
    assert not tlora.train(spec, output=output).failed
