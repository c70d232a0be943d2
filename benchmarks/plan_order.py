"""Whether the planner's order of plans is the one that is measured: two gloo ranks on a CPU, the
demo's base, a few mixes of jobs, each under several plans.

Everything is in processor seconds, for the machine may be busy: a turn takes what the slower rank
computes and sends in it, and waiting is not counted. The profile and the links are measured in the
same way first, so that one clock is behind both sides. Pairs of plans are compared where they
differ by more than the repeats do.

    python benchmarks/plan_order.py [--profile FILE] [--steps 6] [--repeats 3] [--json FILE]
"""

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tlora.core.assets import DEMO
from tlora.core.cluster import Link, uniform_cluster
from tlora.core.load import JobLoad
from tlora.core.plan import Plan
from tlora.core.request import JobRequest
from tlora.costs.groups import Costs
from tlora.costs.profile import read_profile
from tlora.schedule.planner import Planner

WORLD = 2
BUCKET = 512
LENGTH = 64
BASE = str(DEMO / "base")
SETTLING = 2
"""Turns at the start that are not counted."""


@dataclass(frozen=True)
class Job:
    name: str
    rank: int
    batch: int


EVEN = tuple(Job(f"j{place}", 8, 4) for place in range(4))
BIG = (Job("big", 8, 24), *(Job(f"j{place}", 8, 1) for place in range(3)))
ALONE = (Job("only", 8, 8),)
LOCAL = Plan(replicas=2, bucket=BUCKET, adapters="rank_local")
SPREAD = Plan(replicas=2, bucket=BUCKET)
SHARDS = Plan(fsdp=2, bucket=BUCKET, adapters="rank_local")
PLANS = (LOCAL, SPREAD, SHARDS)
MIXED = replace(LOCAL, adapters="mixed", spread=("big",))
CASES = {
    "even": (EVEN, (*PLANS, replace(SHARDS, kept_layers=4), replace(LOCAL, bucket=BUCKET // 4))),
    "one large": (BIG, (*PLANS, MIXED)),
    "one alone": (ALONE, PLANS),
}


def predicted(jobs: tuple[Job, ...], plan: Plan, profile: Path, link: Link, steps: int) -> float:
    """Tokens per second of the whole run."""
    from tlora.core.job import BaseSpec
    from tlora.model.loading import load_shape
    from tlora.runtime.layouts import layout_of

    layout = layout_of(load_shape(BaseSpec(model=BASE)), name="demo", itemsize=4)
    cluster = uniform_cluster(WORLD, links=(link, link, link))
    found = replace(read_profile(profile), budget_tokens=BUCKET)
    sizes = tuple(sorted({32 * place for place in range(1, BUCKET // 32 + 1)}))
    costs = Costs({"demo": replace(found, buckets=sizes)}, cluster)
    requests = [
        JobRequest(
            name=job.name,
            base="demo",
            load=JobLoad(rank=job.rank, batch_size=job.batch, lengths=(LENGTH,)),
            total_steps=steps,
        )
        for job in jobs
    ]
    planner = Planner(costs, requests, layout=layout)
    return planner.run_tokens_per_s(planner.price(plan))


def serve(rank: int, port: int, steps: int, repeats: int) -> None:
    """One rank: links, then every case; a JSON line with processor seconds of each turn."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD)
    told: dict[str, Any] = {"links": probed_links()}
    told["turns"] = {
        name: [[trained(jobs, plan, steps) for _ in range(repeats)] for plan in plans]
        for name, (jobs, plans) in CASES.items()
    }
    print(json.dumps(told), flush=True)
    # Nobody leaves while another still talks.
    dist.barrier()
    dist.destroy_process_group()


def probed_links() -> dict[str, float]:
    """Of one small sum, and of bytes that a gathering leaves."""
    import torch
    import torch.distributed as dist

    def seconds(call, times: int) -> float:
        call()
        started = time.process_time()
        for _ in range(times):
            call()
        return (time.process_time() - started) / times

    small, large = torch.zeros(8), torch.zeros(2**20)
    gathered = torch.zeros(WORLD * len(large))
    latency_s = seconds(lambda: dist.all_reduce(small), 200)
    gather_s = seconds(lambda: dist.all_gather_into_tensor(gathered, large), 20)
    moved = gathered.numel() * gathered.element_size() * (WORLD - 1) / WORLD
    return {"latency_s": latency_s, "bytes_per_s": moved / max(1e-9, gather_s - latency_s)}


def trained(jobs: tuple[Job, ...], plan: Plan, steps: int) -> list[float]:
    """Processor seconds of each turn on this rank."""
    import torch.distributed as dist

    from tlora.core.dealing import Load, deal_jobs
    from tlora.core.job import BaseSpec, DataSpec, JobSpec, LoraSpec, TrainSpec
    from tlora.core.sequence import TokenSequence
    from tlora.parallel.counting import Counts
    from tlora.training.driver import JobDriver
    from tlora.training.group_engine import GroupEngine
    from tlora.training.group_loop import run_group

    class Nobody:
        def on_nano_batch(self, outcome) -> None: ...
        def on_step(self, driver, done) -> None: ...
        def on_evaluation(self, driver, done) -> None: ...
        def on_end(self, driver) -> None: ...

    counts = Counts()
    model, sharded = load_backbone(BaseSpec(model=BASE), plan, counts)

    def spans(name: str) -> bool:
        return plan.adapters == "data_parallel" or name in plan.spread

    engine = GroupEngine(
        model,
        budget_tokens=plan.bucket,
        bucket_step=32,
        counts=counts,
        sharded=sharded,
        spans=spans,
    )
    local = [job for job in jobs if not spans(job.name)]
    loads = [Load(job.name, float(job.batch * LENGTH * steps), job.rank) for job in local]
    places = deal_jobs(loads, WORLD)
    drivers = []
    for seed, job in enumerate(jobs):
        if not spans(job.name) and places[job.name] != dist.get_rank():
            continue
        ids = (
            np.random.default_rng(seed).integers(4, 90, (job.batch * steps, LENGTH)).astype("int32")
        )
        rows = [TokenSequence(each, each) for each in ids]
        spec = JobSpec(
            name=job.name,
            data=DataSpec(path="in memory"),
            lora=LoraSpec(r=job.rank, lora_alpha=16.0),
            train=TrainSpec(batch_size=job.batch, max_steps=steps),
        )
        driver = JobDriver(spec, rows)
        driver.attach(engine, model.new_adapter(spec))
        drivers.append(driver)
    clock = [time.process_time()]

    def between(loop) -> bool:
        clock.append(time.process_time())
        return False

    run_group(engine, drivers, Nobody(), between=between)
    return [after - before for before, after in pairwise(clock[1:])]


def load_backbone(base, plan: Plan, counts):
    import torch

    from tlora.model.loading import load_base
    from tlora.model.super_model import SuperModel
    from tlora.parallel.mesh import shard_mesh
    from tlora.parallel.shard_loading import load_sharded

    device = torch.device("cpu")
    if plan.fsdp == 1:
        return SuperModel(load_base(base, device).float().eval()), None
    mesh = shard_mesh(plan, device)
    loaded, sharded = load_sharded(base, device, mesh, counts=counts, kept_layers=plan.kept_layers)
    with sharded.building():
        model = SuperModel(loaded)
        sharded.serve(model)
    return model, sharded


def make_profile(path: Path) -> None:
    """In processor time."""
    time.perf_counter = time.process_time
    from tlora.cli.main import main

    main(["profile", "--shape", "demo", "--tokens", str(BUCKET), "--output", str(path)])


def started(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def run_ranks(steps: int, repeats: int) -> list[dict[str, Any]]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    common = ("--port", port, "--steps", str(steps), "--repeats", str(repeats))
    ranks = [started("--rank", str(rank), *common) for rank in range(WORLD)]
    told = [rank.communicate()[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks)
    return [json.loads(each.splitlines()[-1]) for each in told]


def measured(told: list[dict[str, Any]], case: str, place: int, steps: int) -> list[float]:
    """Tokens per second of each repeat: the turns of the slower rank, without the first ones."""
    tokens = sum(job.batch for job in CASES[case][0]) * LENGTH * steps
    rates = []
    for ranks in zip(*(each["turns"][case][place] for each in told), strict=True):
        turns = [max(turn) for turn in zip(*ranks, strict=True)]
        usual = float(np.median(turns))
        rates.append(tokens / (sum(turns[SETTLING:]) + usual * min(SETTLING, len(turns))))
    return rates


def compare(told: list[dict[str, Any]], profile: Path, steps: int) -> dict[str, Any]:
    links = {name: min(each["links"][name] for each in told) for name in told[0]["links"]}
    link = Link(**links, overlaps=False)
    rows, agreed, compared = [], 0, 0
    for case, (jobs, plans) in CASES.items():
        found = []
        for place, plan in enumerate(plans):
            rates = measured(told, case, place, steps)
            row = {"case": case, "plan": str(plan), "measured": float(np.median(rates))}
            row |= {"noise": (max(rates) - min(rates)) / float(np.median(rates))}
            found.append(row | {"predicted": predicted(jobs, plan, profile, link, steps)})
        for one, other in combinations(found, 2):
            noise = max(0.05, one["noise"], other["noise"])
            if abs(one["measured"] / other["measured"] - 1) > noise:
                compared += 1
                same = one["measured"] > other["measured"]
                agreed += same == (one["predicted"] > other["predicted"])
        rows += found
    link_figures = {"bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s}
    return {"link": link_figures, "rows": rows, "agreed": agreed, "compared": compared}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--make-profile", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.make_profile is not None:
        make_profile(asked.make_profile)
    if asked.rank is not None:
        serve(asked.rank, asked.port, asked.steps, asked.repeats)
        return
    with tempfile.TemporaryDirectory() as folder:
        profile = asked.profile or Path(folder) / "profile.json"
        if asked.profile is None:
            maker = started("--make-profile", str(profile))
            maker.communicate()
            assert maker.returncode == 0
        result = compare(run_ranks(asked.steps, asked.repeats), profile, asked.steps)
    for row in result["rows"]:
        print(
            f"{row['case']:10} {row['measured']:9,.0f} (noise {row['noise']:.0%}) "
            f"predicted {row['predicted']:9,.0f}  {row['plan']}"
        )
    print(f"the same order in {result['agreed']} of {result['compared']} pairs that differ")
    if asked.json is not None:
        from tlora.runtime.benchmark.record import commit

        facts = {"v": 1, "kind": "plan_order", "commit": commit()}
        facts["command"] = shlex.join(["python", *sys.argv])
        with asked.json.open("a") as file:
            file.write(json.dumps(facts | result) + "\n")


if __name__ == "__main__":
    main()
