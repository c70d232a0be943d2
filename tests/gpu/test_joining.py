"""A job joins a run on a CUDA device through the floor of `tlora train`: its neighbour trains while
it comes, it is attached to the bit as it was drawn or saved, and the pause is short.

    pytest tests/gpu/test_joining.py -m gpu -s --figures benchmarks/results/h200_joining.jsonl

prints the pauses, and how much of each the engine took, and keeps them as lines.
"""

import io
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.arriving import rows_were_waiting
from support.eight_b import VOCABULARY, super_model

from tlora.core.job import BaseSpec, DataSpec, JobSpec, LoraSpec, TrainSpec
from tlora.core.sequence import TokenSequence
from tlora.model.super_model import SuperModel
from tlora.runtime import arriving
from tlora.runtime.benchmark.machine import device_name
from tlora.runtime.benchmark.record import commit, versions
from tlora.runtime.directory import RunDirectory
from tlora.runtime.elastic.one_device import OneDevice
from tlora.runtime.progress import ProgressLines
from tlora.runtime.recording import Recorder
from tlora.runtime.sinks import Sinks
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

RANK = 64
PAUSE_MS = 50.0
PATIENCE_S = 60.0
STEPS_MEANWHILE = 4
Rows = dict[str, torch.Tensor]


class Data:
    """What a job trains on."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        rows = [generator.integers(1, VOCABULARY, size) for size in generator.integers(20, 200, 64)]
        self.train = [TokenSequence(each, each) for each in rows]
        self.evaluation = None
        self.key = str(seed)


def job(name: str, seed: int) -> JobSpec:
    train = TrainSpec(batch_size=4, max_steps=100_000, learning_rate=1e-3, seed=seed)
    return JobSpec(name=name, data=DataSpec(path="none"), lora=LoraSpec(r=RANK), train=train)


def rows_of(model: SuperModel, name: str) -> Rows:
    """What the job's rows hold now, read the plain way."""
    return {
        f"{kind} {matrix}": getattr(rows, kind).to("cpu", copy=True)
        for matrix, rows in model.views(name).items()
        for kind in ("value", "exp_avg", "exp_avg_sq")
    }


def drawn(model: SuperModel, spec: JobSpec) -> Rows:
    found: Rows = {}
    for path, pair in model.new_adapter(spec).items():
        for matrix, value in (("lora_A", pair.a), ("lora_B", pair.b.T)):
            found[f"value {path}.{matrix}"] = value
            for kind in ("exp_avg", "exp_avg_sq"):
                found[f"{kind} {path}.{matrix}"] = torch.zeros_like(value)
    return found


def same(found: Rows, expected: Rows) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )


class View(ProgressLines):
    """Counts steps, and reads a job's rows as it joins."""

    def __init__(self, model: SuperModel) -> None:
        super().__init__(io.StringIO())
        self.model = model
        self.steps = {"here": 0, "late": 0}
        self.joined: list[Rows] = []

    def on_step(self, driver, done) -> None:
        self.steps[done.job] = done.step

    def join(self, driver) -> None:
        super().join(driver)
        self.joined.append(rows_of(self.model, driver.name))


class Run:
    """One job that trains, and `late`, which is held on its way until the other has made some more
    steps; also the desk at which nobody asks."""

    def __init__(self, root: Path, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
        root.mkdir()
        self.root = root
        self.model = super_model(layers, reserve_rows=4 * RANK)
        self.engine = Engine(self.model, budget_tokens=1024, bucket_step=1024)
        self.view = View(self.model)
        sinks = Sinks((), root, print)
        self.recorder = Recorder(
            RunDirectory(root), BaseSpec(model="none"), self.engine, self.view, sinks, looks=False
        )
        here = JobDriver(job("here", 1), Data(1).train)
        here.attach(self.engine, self.model.new_adapter(here.spec))
        self.recorder.start([here])
        self.floor = OneDevice(self.recorder, [here])
        self.gate = threading.Event()
        resumption = arriving.resumption

        def held(*about):
            self.gate.wait(PATIENCE_S)
            return resumption(*about)

        monkeypatch.setattr(arriving, "resumption", held)
        self.waiting = rows_were_waiting(monkeypatch)
        self.attached_ms: list[float] = []
        """What `Engine.attach` took of the pauses."""

        attach = self.engine.attach

        def timed(*about, **settings) -> None:
            began = time.perf_counter()
            attach(*about, **settings)
            self.attached_ms.append(1e3 * (time.perf_counter() - began))

        monkeypatch.setattr(self.engine, "attach", timed)

    def is_asked(self, *, now: bool = False) -> bool:
        return False

    def serve(self, floor: OneDevice, *, now: bool = False) -> None:
        pass

    def run_until(self, happened) -> None:
        desk: Any = self
        self.floor.run(desk, happened)
        assert happened()

    def join(self) -> int:
        """How many steps the other made from when it was admitted to when it was attached."""
        steps, joined, data = self.view.steps, len(self.view.joined), Data(2)
        self.gate.clear()
        before = steps["here"]
        self.floor.admit(job("late", 2), data)  # type: ignore[arg-type]
        self.run_until(lambda: steps["here"] >= before + STEPS_MEANWHILE)
        assert len(self.view.joined) == joined
        self.gate.set()
        self.run_until(lambda: len(self.view.joined) > joined)
        return steps["here"] - before

    def leave(self) -> Rows:
        """With what it holds."""
        held = rows_of(self.model, "late")
        self.floor.dismiss("late")
        self.recorder.save([])
        (self.root / "late" / "result.json").unlink()
        return held

    @property
    def pauses_ms(self) -> list[float]:
        lines = map(json.loads, (self.root / "events.jsonl").read_text().splitlines())
        return [each["paused_ms"] for each in lines if each["kind"] == "joined"]


@pytest.mark.parametrize("layers", [2, 32])
def test_a_neighbour_trains_while_a_job_comes(
    layers: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    keep_line: Callable[[dict[str, object]], None],
) -> None:
    """Anew, and back from its checkpoint with its moments, some times over."""
    run = Run(tmp_path / "run", layers, monkeypatch)
    run.run_until(lambda: run.view.steps["here"] >= 2)
    assert run.join() >= STEPS_MEANWHILE
    assert same(run.view.joined[0], drawn(run.model, job("late", 2)))
    held = run.view.joined[0]
    for _ in range(3):
        before = run.view.steps["late"]
        run.run_until(lambda before=before: run.view.steps["late"] >= before + 2)
        left = run.leave()
        assert not same(left, held), "it has gone on"
        assert run.join() >= STEPS_MEANWHILE
        held = run.view.joined[-1]
        assert same(held, left)
    assert run.waiting == [True] * 4, "rows were found while the other trained"
    run.engine.check_integrity()
    run.recorder.close()
    with capsys.disabled():
        shown, attached = (
            ", ".join(f"{each:.1f}" for each in figures)
            for figures in (run.pauses_ms, run.attached_ms)
        )
        print(f"\n{layers} layers, rank {RANK}: the neighbour stood still for {shown} ms")
        print(f"of these the engine attached for {attached} ms, on the host's clock")
    keep_line(
        {
            "v": 1,
            "kind": "joining",
            "commit": commit(),
            "command": "pytest tests/gpu/test_joining.py --figures FILE",
            "device": device_name(run.model.device),
            "versions": versions(),
            "layers": layers,
            "rank": RANK,
            "parameters": sum(each.numel() for name, each in held.items() if "value" in name),
            "paused_ms": [round(each, 2) for each in run.pauses_ms],
            "attached_ms": [round(each, 2) for each in run.attached_ms],
        }
    )
    # The first one fills the allocator.
    assert max(run.pauses_ms[1:]) < PAUSE_MS
