"""The machines: GPUs in nodes, nodes in racks, and what links them.

A cluster never changes; what breaks or slows down is part of the state (`core/state.py`). GPUs are
whole numbers from 0, counted through nodes and racks in order, so that a neighbour in number is a
neighbour in place.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from tlora.core.errors import SpecError


class Tier(IntEnum):
    """How far apart the GPUs of a group lie: the narrowest of these that holds them all."""

    GPU = 0
    NODE = 1
    RACK = 2
    CLUSTER = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What data between two GPUs of a tier goes over."""

    bytes_per_s: float
    """In one direction, of one GPU."""

    latency_s: float
    """Of one collective operation."""

    overlaps: bool = True
    """Data moves beside the work. Not between processes, whose processors do both."""


LINKS = {
    Tier.NODE: Link(bytes_per_s=300e9, latency_s=30e-6),
    Tier.RACK: Link(bytes_per_s=40e9, latency_s=60e-6),
    Tier.CLUSTER: Link(bytes_per_s=20e9, latency_s=100e-6),
}
"""Assumed, not measured: a switch between the GPUs of a node, 400 Gb/s per GPU out of it, half of
that out of the rack."""

PROCESS_LINK = Link(bytes_per_s=0.6e9, latency_s=5e-4, overlaps=False)
"""Between two one-thread processes of one machine, by gloo: measured by benchmarks/plan_order.py on
a busy CPU of two cores."""


@dataclass(frozen=True, slots=True)
class Gpu:
    number: int
    node: int
    rack: int
    memory_bytes: int | None = None
    """None: whatever the profile says its device has."""


@dataclass(frozen=True, slots=True)
class Node:
    number: int
    rack: int
    gpus: tuple[int, ...]
    members: frozenset[int]
    """The same GPUs."""


@dataclass(frozen=True, slots=True)
class Rack:
    number: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Cluster:
    """All GPUs are of one kind: a base has one profile on them."""

    gpus: tuple[Gpu, ...]
    links: tuple[Link, Link, Link] = (LINKS[Tier.NODE], LINKS[Tier.RACK], LINKS[Tier.CLUSTER])
    """Of NODE, RACK and CLUSTER."""

    def __post_init__(self) -> None:
        if not self.gpus:
            raise SpecError("a cluster needs a GPU", field="gpus")
        if [gpu.number for gpu in self.gpus] != list(range(len(self.gpus))):
            raise SpecError("must be numbered from 0 in order", field="gpus")

    def __len__(self) -> int:
        return len(self.gpus)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        found: dict[int, list[int]] = {}
        rack_of = {gpu.node: gpu.rack for gpu in self.gpus}
        for gpu in self.gpus:
            found.setdefault(gpu.node, []).append(gpu.number)
        return tuple(
            Node(node, rack_of[node], tuple(gpus), frozenset(gpus)) for node, gpus in found.items()
        )

    @cached_property
    def racks(self) -> tuple[Rack, ...]:
        found: dict[int, list[int]] = {}
        for node in self.nodes:
            found.setdefault(node.rack, []).append(node.number)
        return tuple(Rack(rack, tuple(nodes)) for rack, nodes in found.items())

    def tier(self, gpus: Iterable[int]) -> Tier:
        """The narrowest tier that holds all of these."""
        first, *others = [self.gpus[number] for number in gpus]
        if not others:
            return Tier.GPU
        node, rack = first.node, first.rack
        tier = Tier.NODE
        for gpu in others:
            if gpu.rack != rack:
                return Tier.CLUSTER
            if gpu.node != node:
                tier = Tier.RACK
        return tier

    def link(self, tier: Tier) -> Link | None:
        """None within one GPU."""
        return None if tier is Tier.GPU else self.links[tier - 1]

    def memory_bytes(self, gpus: Iterable[int]) -> int | None:
        """Of the smallest of these; None where none of them says."""
        found = [self.gpus[number].memory_bytes for number in gpus]
        return min((each for each in found if each is not None), default=None)


def uniform_cluster(
    gpus: int,
    *,
    per_node: int = 8,
    nodes_per_rack: int = 4,
    memory_bytes: int | None = None,
    links: tuple[Link, Link, Link] | None = None,
) -> Cluster:
    """So many GPUs in equal nodes and racks; the last ones may be smaller."""
    if gpus < 1 or per_node < 1 or nodes_per_rack < 1:
        raise SpecError("gpus, per_node and nodes_per_rack must be at least 1", field="gpus")
    places = tuple(
        Gpu(number, number // per_node, number // (per_node * nodes_per_rack), memory_bytes)
        for number in range(gpus)
    )
    return Cluster(places) if links is None else Cluster(places, links)


def cluster_of(device_type: str, devices: int, *, per_node: int = 8) -> Cluster:
    """So many devices of a kind; where they are processes of a CPU, gloo links them."""
    links = (PROCESS_LINK, PROCESS_LINK, PROCESS_LINK) if device_type == "cpu" else None
    return uniform_cluster(devices, per_node=per_node, links=links)
