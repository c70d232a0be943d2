"""The same work over processes of one thread each, as `tlora train --devices N` runs it on a CPU.

Every process has its own copy of the base and whole jobs, dealt so that tokens are even. They begin
a run at one word; the slowest one's time counts.
"""

import multiprocessing
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from tlora.core.job import JobSpec
from tlora.runtime.benchmark.rounds import Run
from tlora.runtime.benchmark.settings import Settings
from tlora.runtime.benchmark.workload import Done, Workload

FUSED, PEFT_PADDED, PEFT_PACKED = "fused", "padded", "packed"
"""What a process may be told to run."""


def dealt(work: Workload, count: int) -> list[Workload]:
    """Longest first, each job to whoever has the fewest tokens; in the order of the work."""
    shares: list[list[JobSpec]] = [[] for _ in range(count)]
    tokens = [0] * count
    for job in sorted(work.jobs, key=lambda job: -work.of([job]).tokens):
        least = tokens.index(min(tokens))
        shares[least].append(job)
        tokens[least] += work.of([job]).tokens
    ordered = [[job for job in work.jobs if job in share] for share in shares]
    return [Workload(jobs, {job.name: work.rows[job.name] for job in jobs}) for jobs in ordered]


class Processes:
    """Started and loaded; `close` ends them."""

    def __init__(self, settings: Settings, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, settings, number, count), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for pipe in self._pipes:
            pipe.recv()

    def run(self, what: str) -> Run:
        for pipe in self._pipes:
            pipe.send(what)
        runs = [Run(seconds, Done(*done)) for seconds, done in (p.recv() for p in self._pipes)]
        return together(runs)

    def close(self) -> None:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
            pipe.close()
        for process in self._processes:
            process.join()


def together(runs: Sequence[Run]) -> Run:
    """Side by side: the slowest one's time, everybody's work."""
    return Run(
        max(run.seconds for run in runs),
        Done(
            sum(run.done.tokens for run in runs),
            sum(run.done.sequences for run in runs),
            sum(run.done.steps for run in runs),
        ),
    )


def serve(pipe: Connection, settings: Settings, number: int, count: int) -> None:
    """The life of a process: it loads, says so, and runs what it is told to."""
    import torch

    from tlora.model.super_model import SuperModel
    from tlora.runtime.benchmark import shapes
    from tlora.runtime.benchmark.arms import draw_adapters, train_together
    from tlora.runtime.benchmark.bench import workload_for
    from tlora.runtime.benchmark.peft_arm import PeftJobs, train_one_by_one
    from tlora.runtime.environment import quieten_libraries

    quieten_libraries()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    settings = replace(settings, threads=1)
    assert settings.shape and settings.budget
    shape = shapes.look_at(settings.shape, settings.dtype, device)
    work = dealt(workload_for(settings, shape), count)[number]
    model = shapes.load(shape, device)
    ranks = sum(job.lora.r for job in work.jobs)
    # Compiled layers are for one process: it is fused products that are compared here.
    own = shapes.twin(model, quantization=settings.quantization)
    ours = SuperModel(own, reserve_rows=max(1, ranks))
    adapters = draw_adapters(ours, work.jobs)
    peft: PeftJobs | None = None
    pipe.send("ready")
    while True:
        try:
            what = pipe.recv()
        except EOFError:
            return
        if what is None:
            return
        if not work.jobs:
            run = Run(0.0, Done(0, 0, 0))
        elif what == FUSED:
            run = train_together(ours, work, work.jobs, settings.budget, adapters=adapters)
        else:
            peft = peft or PeftJobs(shapes.twin(model), adapters)
            run = train_one_by_one(peft, work, packed=what == PEFT_PACKED)
        done = run.done
        pipe.send((run.seconds, (done.tokens, done.sequences, done.steps)))
