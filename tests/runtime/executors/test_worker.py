"""One worker: jobs come, go and come back as if they had stayed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.native import require_native, require_native_attention
from support.waiting import PATIENCE_S

from tlora.config import dump_spec
from tlora.core.errors import SpecError
from tlora.kernels import host_products
from tlora.kernels.attention import native as native_attention
from tlora.kernels.multi_lora import native
from tlora.runtime import saving
from tlora.runtime.executors.messages import (
    Asked,
    Attach,
    Attached,
    Detach,
    Detached,
    Ended,
    GoOn,
    Message,
    Ready,
    Stepped,
    Stop,
    Tune,
    commands_of,
    encoded,
    messages_of,
)
from tlora.runtime.executors.worker import Worker, WorkerSettings
from tlora.runtime.training import describe_run, train
from tlora.training.exactness import Exactness

BUCKET = 256


def new_worker(root: Path, *, asks: bool = False) -> tuple[Worker, list[Message]]:
    told: list[Message] = []
    return Worker(WorkerSettings(root, "cpu", asks=asks), told.append), told


def attach(worker: Worker, *jobs: str, weight: float = 1.0, bucket: int = BUCKET) -> None:
    """And wait until they are there, or cannot be."""
    for job in jobs:
        worker.obey(Attach(job, weight, bucket))
    while worker.arrivals:
        worker.arrivals.wait(PATIENCE_S)
        worker.work(lambda: True)


def adapter(root: Path, job: str) -> dict:
    return load_file(root / job / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize("whose", ["adapters", "attention"])
def test_a_worker_with_other_kernels_than_the_run_does_not_train_exactly(
    whose: str, new_run, monkeypatch
) -> None:
    """Where its compiler was too slow, say: jobs move between workers, and bits would change."""
    spec, root = new_run("a")
    engine = replace(spec.engine, isolation="exact", nano_batch_tokens=BUCKET)
    spec = replace(spec, engine=engine)
    (root / "resolved.yaml").write_text(dump_spec(spec))
    settings = WorkerSettings(root, "cpu", exact_tokens=BUCKET)
    proof = Exactness(BUCKET, 0, [], 0.0, adapters="C", frozen="torch", attention="C")
    about = describe_run(spec, torch.device("cpu"), proof)
    (root / "run.json").write_text(json.dumps(about))
    monkeypatch.setattr(host_products, "_prefers_onednn", lambda: False)
    require_native()
    require_native_attention()
    Worker(settings, lambda message: None)
    kernels = {"adapters": native, "attention": native_attention}[whose]
    monkeypatch.setattr(kernels, "_native", lambda: None)
    with pytest.raises(SpecError, match=f"{whose} computed by C and would go on with torch"):
        Worker(settings, lambda message: None)


def test_a_job_that_moves_between_workers_trains_as_one_that_stays(new_run, tmp_path) -> None:
    """Neighbours differ on the way, and so do nano-batches; its adapter and its metrics do not,
    while another seed's do."""
    spec, root = new_run("a", "b", "c", max_steps=6)
    stayed = tmp_path / "stayed"
    train(spec, output=stayed)
    first, told = new_worker(root)
    second, told_second = new_worker(root)
    attach(first, "a", "b")
    attach(second, "c", bucket=64)
    first.work(lambda: sum(isinstance(each, Stepped) for each in told) >= 4)
    first.obey(Detach("a"))
    [gone] = [each for each in told if isinstance(each, Detached)]
    assert gone.step == max(each.step for each in told if isinstance(each, Stepped))
    attach(second, "a", weight=2.0, bucket=64)
    [come] = [each for each in told_second if isinstance(each, Attached) and each.job == "a"]
    assert come.step == gone.step
    for worker in (first, second):
        worker.work(lambda: False)
        assert not worker.has_work
        worker.obey(Stop())
        assert worker.stopped
    ended = {each.job: each.result for each in (*told, *told_second) if isinstance(each, Ended)}
    assert {job: result["status"] for job, result in ended.items()} == dict.fromkeys(
        "abc", "completed"
    )
    for job in "abc":
        ours, theirs = adapter(root, job), adapter(stayed, job)
        # Sums over other nano-batches differ by rounding, which Adam's first steps magnify: up to
        # 2e-5 of the largest weight was seen.
        for key, expected in theirs.items():
            assert (ours[key] - expected).abs().max() <= 1e-3 * expected.abs().max(), (job, key)
        steps = [json.loads(line)["step"] for line in (root / job / "metrics.jsonl").open()]
        assert steps == [
            json.loads(line)["step"] for line in (stayed / job / "metrics.jsonl").open()
        ]
    other = adapter(root, "b")
    assert any((other[key] - each).abs().max() > 1e-3 for key, each in adapter(stayed, "a").items())


def test_a_job_that_is_over_or_cannot_come_says_so(new_run) -> None:
    """Its neighbours train on."""
    spec, root = new_run("a", "b", "late")
    worker, told = new_worker(root)
    Path(spec.jobs[1].data.paths[0]).write_text("{}\n")
    attach(worker, "a", "b")
    [failed] = [each for each in told if isinstance(each, Ended)]
    assert (failed.job, failed.result["status"]) == ("b", "failed")
    worker.work(lambda: False)
    worker.obey(Detach("a"))
    assert told[-1] == Detached("a", None, 0.0)
    attach(worker, "a")
    assert isinstance(told[-1], Ended)
    assert told[-1].result["status"] == "completed"
    assert json.loads((root / "b" / "result.json").read_text())["status"] == "failed"


def test_a_trial_that_was_saved_after_its_question_asks_again(new_run) -> None:
    """Whoever led the sweep may have ended without an answer: the next one is asked the same, to
    the bit, before the trial makes another step."""
    spec, root = new_run("a", max_steps=6)
    held_out = replace(spec.jobs[0], eval=replace(spec.jobs[0].eval, split=2, steps=2))
    (root / "resolved.yaml").write_text(dump_spec(replace(spec, jobs=(held_out,))))
    worker, told = new_worker(root, asks=True)
    attach(worker, "a")
    worker.work(lambda: False)
    worker.obey(GoOn("a"))
    worker.work(lambda: False)
    first = told[-1]
    assert isinstance(first, Asked) and first.step == 2
    assert {"loss", "eval_loss", "grad_norm"} <= first.metrics.keys()
    worker.obey(Stop())

    again, told = new_worker(root, asks=True)
    attach(again, "a")
    assert told[-1] == first and not again.has_work
    again.obey(GoOn("a"))
    again.work(lambda: False)
    last = told[-1]
    assert isinstance(last, Asked) and last.step == 4 and last.metrics != first.metrics


def test_a_job_that_cannot_be_saved_does_not_leave(new_run, monkeypatch) -> None:
    """It would go on elsewhere from an older step, or anew: it stops where it is, with the cause.
    Its neighbour, whose checkpoint fails meanwhile, stops too; with room again both go on."""

    def full(parent: Path, job: str, checkpoint) -> None:
        raise OSError(28, "No space left on device")

    _, root = new_run("a", "b", max_steps=6)
    worker, told = new_worker(root)
    attach(worker, "a", "b")
    worker.work(lambda: sum(isinstance(each, Stepped) for each in told) >= 4)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_checkpoint", full)
        worker.recorder.checkpoint(worker.drivers["b"])
        worker.obey(Detach("a"))
        worker.work(lambda: False)
    assert not any(isinstance(each, Detached) for each in told)
    ended = {each.job: each.result for each in told if isinstance(each, Ended)}
    assert {job: result["status"] for job, result in ended.items()} == dict.fromkeys("ab", "paused")
    assert all("No space left on device" in result["reason"] for result in ended.values())
    attach(worker, "a", "b")
    worker.work(lambda: False)
    ended = {each.job: each.result for each in told if isinstance(each, Ended)}
    assert {result["status"] for result in ended.values()} == {"completed"}


def test_a_job_that_cannot_come_takes_nobody_with_it_on_a_full_disk(new_run, monkeypatch) -> None:
    """Its result cannot be written either; whoever leads hears of it, and the others train."""

    def full(*about) -> None:
        raise OSError(28, "No space left on device")

    spec, root = new_run("a", "b")
    worker, told = new_worker(root)
    attach(worker, "a")
    Path(spec.jobs[1].data.paths[0]).write_text("{}\n")
    with monkeypatch.context() as patch:
        patch.setattr(worker.directory, "write_result", full)
        attach(worker, "b")
    assert isinstance(told[-1], Ended) and told[-1].job == "b"
    worker.work(lambda: False)
    assert {each.job for each in told if isinstance(each, Ended)} == {"a", "b"}


def test_weights_and_sizes_change_while_jobs_train(new_run) -> None:
    """A job with more weight gets more of each nano-batch."""
    _, root = new_run("a", "b", max_steps=200, batch_size=8)
    worker, told = new_worker(root)
    attach(worker, "a", "b", bucket=64)
    worker.obey(Tune(32, {"a": 4.0, "b": 1.0, "nobody": 1.0}))
    assert worker.engine.budget_tokens == 32
    worker.work(lambda: sum(isinstance(each, Stepped) for each in told) >= 20)
    made = {job: worker.drivers[job].step for job in "ab"}
    assert 2.0 < made["a"] / made["b"] < 6.0


def test_commands_and_messages_survive_json() -> None:
    """Pipes carry nothing else."""
    commands = [Attach("a", 0.1, 64), Detach("a"), Tune(32, {"a": 1.5}), Stop()]
    assert commands_of(encoded(commands)) == commands
    messages = [Ready(0.5), Attached("a", 3, 0.1, 0.4), Detached("a", None, 0.0)]
    assert messages_of(encoded(messages)) == messages
