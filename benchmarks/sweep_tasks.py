"""Three sweeps on two workers: planned together, one after another, and each on a fixed device.

    python benchmarks/sweep_tasks.py --model DIR --data FOLDER [--json FILE] [--processes]

Every task has twelve trials (learning rate x rank x batch size) of one dataset, with the published
early exit. `together` is `tlora tune --devices N` on all tasks; `one after another` is each task by
itself with all devices, the times added; `fixed` gives task i device i modulo N and never another.

The workers are the real ones, in this process: they take turns, and each has a clock of the
processor time that its thread took, so that the times are those of workers with a core each, on
however busy a machine. A worker that is told something by the leading process goes on no earlier
than that was known. Left out: loading, and the time of the leading process, which is printed.
`--processes` measures seconds of worker processes instead. docs/sweeps.md has figures.
"""

import argparse
import io
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tlora.config import load_tasks
from tlora.core.clock import ManualClock
from tlora.runtime.benchmark.record import commit, versions
from tlora.runtime.executors.messages import Command, Message, Noted, Stop
from tlora.runtime.executors.worker import Worker, WorkerSettings
from tlora.runtime.sweeps.conductor import Dealer, Dealt, by_plan
from tlora.runtime.sweeps.tasks import Workers, tune_on_devices
from tlora.runtime.sweeps.timeline import read_timeline
from tlora.runtime.sweeps.view import View
from tlora.schedule.tasks import TaskWork, dealt_fixed

DATASETS = "nl2bash,gsm8k,commonsense_mc"


class TakingTurns:
    """Workers of this process, each with its own clock: the one that is behind goes first, and what
    one says is heard when no other is still before that."""

    def __init__(self, settings: list[WorkerSettings]) -> None:
        self.clock = ManualClock()
        self.spent = [0.0] * len(settings)
        """Processor seconds of each."""

        self._at = [0.0] * len(settings)
        self._zero, self._slice = time.time(), time.thread_time()
        self._inbox: list[tuple[float, int, int, Message]] = []
        self._count = 0
        self._workers = [
            Worker(each, lambda message, device=device: self._told(device, message))
            for device, each in enumerate(settings)
        ]

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def makespan(self) -> float:
        return max(self._at)

    def send(self, device: int, command: Command) -> None:
        self._at[device] = max(self._at[device], self.clock.now())
        self._run(device, lambda: self._workers[device].obey(command))

    def receive(self, timeout_s: float) -> list[tuple[int, Message]]:
        while True:
            busy = [at for at, worker in enumerate(self._workers) if worker.has_work]
            horizon = min((self._at[device] for device in busy), default=float("inf"))
            ready = [each for each in self._inbox if each[0] <= horizon]
            if ready:
                first = min(ready)
                self._inbox.remove(first)
                self.clock.move_to(max(self.clock.now(), first[0]))
                return [(first[2], first[3])]
            if not busy:
                self.clock.move_to(self.clock.now() + timeout_s)
                return []
            self._one_nano_batch(min(busy, key=lambda each: self._at[each]))

    def restart(self, device: int) -> None:
        raise AssertionError("a worker of this process is not lost alone")

    def close(self) -> list[tuple[int, Message]]:
        before = list(self._at)
        for worker in self._workers:
            worker.obey(Stop())
        self._at = before
        return [(device, message) for _, _, device, message in sorted(self._inbox)]

    def _one_nano_batch(self, device: int) -> None:
        asked = iter((False,))
        self._run(device, lambda: self._workers[device].work(lambda: next(asked, True)))

    def _run(self, device: int, act: Callable[[], None]) -> None:
        self._slice = time.thread_time()
        act()
        took = time.thread_time() - self._slice
        self.spent[device] += took
        self._at[device] += took
        self._slice = time.thread_time()

    def _told(self, device: int, message: Message) -> None:
        at = self._at[device] + time.thread_time() - self._slice
        if isinstance(message, Noted):
            message = replace(message, time=self._zero + at)
        self._count += 1
        self._inbox.append((at, self._count, device, message))


@dataclass(frozen=True)
class Measured:
    seconds: float
    busy: float
    """Seconds of all devices together."""

    leading: float
    """Processor seconds of the leading process."""

    plans: int
    predicted: tuple[float | None, float | None]
    winners: frozenset[str]


def sweep_file(model: Path, data: Path, names: list[str], *, steps: int) -> dict[str, Any]:
    return {
        "base": {"model": str(model)},
        "engine": {"device": "cpu"},
        "defaults": {
            "lora": {"lora_alpha": 16},
            "train": {"max_steps": steps, "max_length": 96},
            "eval": {"split": 6, "steps": max(1, steps // 10)},
        },
        "tasks": [
            {"name": name.replace("_", "-"), "data": {"path": str(data / f"{name}.jsonl.gz")}}
            for name in names
        ],
        "search": {
            "space": {
                "train.learning_rate": [1e-4, 1e-3, 1e-2],
                "lora.r": [2, 16],
                "train.batch_size": [2, 4],
            }
        },
    }


def fixed(homes: Mapping[str, int]) -> Dealer:
    def deal(works: list[TaskWork], on: Mapping[int, str | None]) -> Dealt:
        left = {work.name for work in works}
        return Dealt(dealt_fixed(on, {name: at for name, at in homes.items() if name in left}))

    return deal


def measured(
    file: dict[str, Any], folder: Path, devices: int, deal: Dealer, *, processes: bool
) -> Measured:
    turns: list[TakingTurns] = []

    def start(settings: list[WorkerSettings]) -> Workers:
        turns.append(TakingTurns(settings))
        return Workers(turns[0], turns[0].clock)

    began = time.thread_time()
    done = tune_on_devices(
        load_tasks(file),
        output=folder,
        devices=devices,
        view=View(io.StringIO()),
        deal=deal,
        workers=None if processes else start,
    )
    took = time.thread_time() - began
    tasks = {trial.name: name for name, study in done.studies.items() for trial in study.trials}
    timeline = read_timeline(folder, tasks, devices)
    assert timeline is not None, f"{folder} has no events"
    busy = sum(timeline.busy.values()) if processes else sum(turns[0].spent)
    return Measured(
        timeline.seconds if processes else turns[0].makespan,
        busy,
        took if processes else took - busy,
        timeline.plans,
        (done.predicted_s, done.one_after_another_s),
        frozenset(study.best.name for study in done.studies.values() if study.best is not None),
    )


def arms(
    file: dict[str, Any], folder: Path, devices: int, *, processes: bool
) -> dict[str, Callable[[], list[Measured]]]:
    names = [task["name"] for task in file["tasks"]]
    homes = {name: at % devices for at, name in enumerate(names)}

    def run(file: dict[str, Any], name: str, deal: Dealer = by_plan) -> Measured:
        return measured(file, folder / name, devices, deal, processes=processes)

    def alone(name: str) -> dict[str, Any]:
        (task,) = [each for each in file["tasks"] if each["name"] == name]
        return {key: value for key, value in file.items() if key != "tasks"} | {"task": task}

    return {
        "together": lambda: [run(file, "together")],
        "one after another": lambda: [run(alone(name), f"alone-{name}") for name in names],
        "fixed": lambda: [run(file, "fixed", fixed(homes))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Three sweeps on two workers.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--datasets", default=DATASETS)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    file = sweep_file(asked.model, asked.data, asked.datasets.split(","), steps=asked.steps)
    results: dict[str, dict[str, Any]] = {}
    winners: set[frozenset[str]] = set()
    with tempfile.TemporaryDirectory() as scratch:
        for arm, run in arms(file, Path(scratch), asked.devices, processes=asked.processes).items():
            found = run()
            seconds, busy = sum(each.seconds for each in found), sum(each.busy for each in found)
            winners.add(frozenset().union(*(each.winners for each in found)))
            results[arm] = {
                "seconds": round(seconds, 2),
                "busy_share": round(busy / (asked.devices * seconds), 4),
                "device_seconds": round(busy, 2),
                "leading_seconds": round(sum(each.leading for each in found), 2),
                "plans": sum(each.plans for each in found),
            }
            if arm == "together":
                results[arm]["predicted_s"], results[arm]["predicted_in_turn_s"] = found[
                    0
                ].predicted
            print(f"{arm:18} {json.dumps(results[arm])}", flush=True)
    shortest = results["together"]["seconds"]
    print(f"\n{'':18} {'seconds':>8} {'busy':>6} {'to together':>12}")
    for arm, each in results.items():
        times = each["seconds"] / shortest
        print(f"{arm:18} {each['seconds']:8.1f} {each['busy_share']:6.0%} {times:12.2f}")
    if asked.json is not None:
        clock = "seconds" if asked.processes else "processor seconds of each worker"
        line = {
            "v": 1,
            "kind": "sweep_tasks",
            "commit": commit(),
            "command": "python " + shlex.join(sys.argv),
            "device": f"{asked.devices} x cpu, 1 thread each",
            "versions": versions(),
            "clock": clock,
            "datasets": asked.datasets.split(","),
            "trials_per_task": 12,
            "steps": asked.steps,
            "arms": results,
            "same_winners": len(winners) == 1,
        }
        with asked.json.open("a") as out:
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
