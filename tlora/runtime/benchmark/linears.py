"""What the adapters cost on one layer's linears, against the same linears frozen and the floor.

Linears that share an input are measured together, as the engine runs them: forward and backward
over one nano-batch of the workload with all jobs attached.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F

from tlora.core.sequence import TokenSequence
from tlora.kernels import host_products
from tlora.model.linear import LoraLinear
from tlora.model.packing import PackedBatch, Share, pack
from tlora.model.super_model import SuperModel
from tlora.model.targets import Target
from tlora.runtime.benchmark.arms import Adapters, draw_adapters
from tlora.runtime.benchmark.machine import replayed, seconds_in_turn
from tlora.runtime.benchmark.workload import Workload


@dataclass(frozen=True, slots=True)
class LinearTime:
    """Milliseconds, forward and backward."""

    name: str
    in_features: int
    out_features: int
    count: int
    """So many groups of the model are like this one."""

    ms_frozen: float
    ms_fused: float
    floor_ms: float


def adapter_bytes(tokens: int, in_features: int, out_features: int, itemsize: int) -> int:
    """The least that adapters must move: the input once for X A^T and once for dA, the outputs'
    gradients once. Adding to outputs and to dX is free if it is folded into what runs anyway."""
    return tokens * itemsize * (2 * in_features + out_features)


def overhead_pct(times: Sequence[LinearTime]) -> float | None:
    """Over the frozen linears, all groups of the model together; None if none were measured."""
    if not times:
        return None
    frozen = sum(each.count * each.ms_frozen for each in times)
    fused = sum(each.count * each.ms_fused for each in times)
    return (fused / frozen - 1) * 100


def measure(
    model: SuperModel,
    work: Workload,
    *,
    budget_tokens: int,
    copy_bytes_per_s: float,
    adapters: Adapters | None = None,
) -> list[LinearTime]:
    """Jobs are attached for this and detached again."""
    adapters = adapters or draw_adapters(model, work.jobs)
    for job in work.jobs:
        model.attach(
            job.name,
            adapters[job.name],
            scale=job.lora.scale,
            dropout=job.lora.lora_dropout,
        )
    try:
        batch = full_batch(work, budget_tokens, model.device)
        return [
            _time_group(model, batch, targets, count, copy_bytes_per_s)
            for targets, count in _distinct(model)
        ]
    finally:
        for job in work.jobs:
            model.detach(job.name)


def full_batch(work: Workload, budget_tokens: int, device: torch.device) -> PackedBatch:
    """Rows of every job in turn until the budget is full; a job's first row is always in."""
    taken: dict[str, list[TokenSequence]] = {job.name: [] for job in work.jobs}
    longest = max(len(rows) for rows in work.rows.values())
    room = budget_tokens
    for place in range(longest):
        for name, rows in work.rows.items():
            if place < len(rows) and (len(rows[place]) <= room or place == 0):
                taken[name].append(rows[place])
                room -= len(rows[place])
    shares = [
        Share(name, rows, _offsets(rows), [1.0] * len(rows), key=number)
        for number, (name, rows) in enumerate(taken.items())
    ]
    return pack(shares, budget_tokens - min(room, 0), device)


def _offsets(rows: Sequence[TokenSequence]) -> list[int]:
    offsets, start = [], 0
    for row in rows:
        offsets.append(start)
        start += len(row)
    return offsets


def _distinct(model: SuperModel) -> list[tuple[list[Target], int]]:
    """One group of each kind, and how many there are."""

    def kind(targets: list[Target]) -> tuple[tuple[str, int, int], ...]:
        return tuple((t.leaf, t.in_features, t.out_features) for t in targets)

    groups = [pool.targets for pool in model.pools]
    counts = Counter(map(kind, groups))
    first = {kind(targets): targets for targets in reversed(groups)}
    return [(first[each], count) for each, count in counts.items()]


def _time_group(
    model: SuperModel,
    batch: PackedBatch,
    targets: list[Target],
    count: int,
    copy_bytes_per_s: float,
) -> LinearTime:
    in_features = targets[0].in_features
    out_features = sum(target.out_features for target in targets)
    linears = [cast(LoraLinear, model.model.get_submodule(target.path)) for target in targets]
    dtype, device, tokens = model.model.dtype, model.device, batch.num_rows
    generator = torch.Generator(device=device).manual_seed(0)

    def random(width: int) -> torch.Tensor:
        return torch.randn(1, tokens, width, device=device, dtype=dtype, generator=generator)

    x = random(in_features).requires_grad_(True)
    dy = [random(target.out_features) for target in targets]

    group = linears[0].group
    # Quantised ones unpacked before the clock runs: it is products in full that are compared with.
    weights = group.full_weights()

    def frozen() -> None:
        pairs = list(zip(weights, group.biases, strict=True))
        if device.type == "cpu":
            # As quick as what the fused ones stand on.
            for weight, bias in pairs:
                host_products.linear(x.detach()[0], weight, bias)
            host_products.input_gradient([dy_l[0] for dy_l in dy], weights)
            return
        outputs = [F.linear(x, weight, bias) for weight, bias in pairs]
        torch.autograd.grad(outputs, x, dy)

    def fused() -> None:
        torch.autograd.grad([linear(x) for linear in linears], x, dy)

    with model.routed(batch, train=True):
        steps = [replayed(step, device) for step in (frozen, fused)]
        ms_frozen, ms_fused = (1e3 * seconds for seconds in seconds_in_turn(steps, device))
    extra = adapter_bytes(batch.num_tokens, in_features, out_features, dtype.itemsize)
    return LinearTime(
        name=",".join(target.leaf for target in targets),
        in_features=in_features,
        out_features=out_features,
        count=count,
        ms_frozen=ms_frozen,
        ms_fused=ms_fused,
        floor_ms=ms_frozen + extra / copy_bytes_per_s * 1e3,
    )
