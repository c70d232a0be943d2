"""Ranks and what a plan makes of them: (replica, shard) of each, and the process groups behind."""

import datetime
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tlora.core.errors import SpecError
from tlora.core.plan import Plan
from tlora.parallel.meeting import meet

AXES = ("replica", "shard")


@dataclass(frozen=True, slots=True)
class Place:
    """Of a rank: shards of one copy are neighbours, so that a copy stays inside a node."""

    replica: int
    shard: int


def place_of(rank: int, plan: Plan) -> Place:
    return Place(*divmod(rank, plan.fsdp))


def check_runs(plan: Plan, world: int) -> None:
    """Refuse what these ranks cannot carry out."""
    if plan.tp > 1 or plan.pp > 1:
        raise SpecError(
            f"{plan.tp} x tp and {plan.pp} x pp were asked for, and neither is built; use replicas "
            "and fsdp",
            field="plan.tp" if plan.tp > 1 else "plan.pp",
        )
    if plan.gpus != world:
        raise SpecError(
            f"{plan.replicas} replicas x {plan.fsdp} shards are {plan.gpus} ranks, and there are "
            f"{world}",
            field="plan.replicas",
        )


SHARE_GPUS = "TLORA_SHARE_GPUS"
"""Set to 1 where ranks are to share the GPUs of their node: a plan is tried that has more ranks."""


def shares_gpus() -> bool:
    return os.environ.get(SHARE_GPUS) == "1"


class Link(NamedTuple):
    """What a rank computes on, and what it talks to the others by."""

    device: torch.device
    backend: str


def link_of(local: int, gpus: int, *, ranks: int, share: bool) -> Link:
    """Of a rank by its number on its node, which has so many GPUs and ranks: nccl where each rank
    has a GPU, gloo where there is none. Ranks that share one speak by gloo too, by way of the host:
    nccl refuses them. Raises SpecError where some would have a GPU and others none: they would wait
    for each other in two languages."""
    if gpus == 0:
        return Link(torch.device("cpu"), "gloo")
    if share:
        return Link(torch.device(f"cuda:{local % gpus}"), "gloo")
    if ranks > gpus:
        raise SpecError(
            f"this node has {ranks} ranks, and each sees {gpus} GPU{'s' * (gpus > 1)}: start at "
            f"most {gpus} here, or set {SHARE_GPUS}=1 to let them share"
        )
    return Link(torch.device(f"cuda:{local}"), "cuda:nccl,cpu:gloo")


def join(asked: str = "auto", *, timeout_s: float = 600.0) -> torch.device:
    """Enter the group that the environment describes (torchrun's variables): this rank's device.
    `asked`: engine.device, by which GPUs may be left alone."""
    # Read here and nowhere else.
    local = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
    # Where nobody says how many there are, at least those up to this one.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
    may_use = torch.cuda.is_available() and not asked.startswith("cpu")
    gpus = torch.cuda.device_count() if may_use else 0
    device, backend = link_of(local, gpus, ranks=ranks, share=shares_gpus())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            backend, timeout=datetime.timedelta(seconds=timeout_s), **_launched(timeout_s)
        )
    return device


def _launched(timeout_s: float) -> dict[str, Any]:
    """Where a launcher keeps the store that ranks meet at, those of each attempt have a part of it
    to themselves."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    store = meet(store, rank, world, timeout_s=timeout_s)
    return {"store": store, "rank": rank, "world_size": world}


def shard_mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    """What FSDP2 lays the backbone over: one axis, or two where there are several copies (HSDP).
    All ranks must call this."""
    if plan.replicas == 1:
        return init_device_mesh(device.type, (plan.fsdp,), mesh_dim_names=(AXES[1],))
    return init_device_mesh(device.type, (plan.replicas, plan.fsdp), mesh_dim_names=AXES)
