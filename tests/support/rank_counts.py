"""What ranks say to each other, counted and summed."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from support.jobs import base_model
from support.rank_jobs import sharded_model, spec_of
from support.rank_work import train_in_group
from tlora.model.super_model import SuperModel
from tlora.parallel import lock_step
from tlora.parallel.counting import Counts
from tlora.parallel.reduction import sum_in_order


def watched(**settings: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """Train in a group: what it says of its communication, and the collectives that were called."""
    calls: dict[str, int] = {}
    passes = {"forward": 0, "train": 0}
    judge = lock_step.judge

    def counted(name: str, call):
        def run(*arguments, **options):
            calls[name] = calls.get(name, 0) + 1
            return call(*arguments, **options)

        return run

    def judged(reduced, last, **about):
        verdict = judge(reduced, last, **about)
        if verdict.kind is not None and not verdict.over:
            passes[verdict.kind.value] += 1
        return verdict

    names = {
        "all_gather_into_tensor": "all_gather",
        "all_gather_single": "all_gather",
        "all_reduce": "all_reduce",
        **{
            each: each
            for each in ("broadcast", "reduce", "gather", "all_gather", "all_to_all", "scatter")
        },
        "all_to_all_single": "all_to_all",
        "reduce_scatter_tensor": "reduce_scatter",
        "reduce_scatter_single": "reduce_scatter",
    }
    names = {name: kind for name, kind in names.items() if hasattr(dist, name)}
    kept = {name: getattr(dist, name) for name in names}
    if settings["plan"].fsdp > 1:
        # Made before, for that gathers too; and nothing is left gathered by others.
        sharded_model(settings["path"], settings["plan"], False)[1].reset()
    try:
        for name, kind in names.items():
            setattr(dist, name, counted(kind, kept[name]))
        lock_step.judge = judged
        told = train_in_group(**settings)
    finally:
        lock_step.judge = judge
        for name, call in kept.items():
            setattr(dist, name, call)
    told.counts["control"]["passes"] = passes  # type: ignore[assignment]
    return told.counts, calls


def sums_by_rank() -> dict[str, Any]:
    """Random parts on each rank, summed by `sum_in_order` and by adding all of them up here."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shapes = ((3, 17), (1,), (5, 7, 3), (101,))

    def parts_of(number: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        return [
            torch.randn(shape, generator=generator)
            * 10 ** (4 * torch.rand(shape, generator=generator))
            for shape in shapes
        ]

    everybody = [parts_of(number) for number in range(world)]
    figures = [[0.1 * (number + 1), 1e9 + number / 3] for number in range(world)]
    counts = Counts()
    own = parts_of(rank)
    sums = sum_in_order(own, figures[rank], counts=counts)
    tally = counts.as_json()["gradient"]

    def added(order: Sequence[int]) -> list[torch.Tensor]:
        total = [part.clone() for part in everybody[order[0]]]
        for number in order[1:]:
            for so_far, part in zip(total, everybody[number], strict=True):
                so_far += part
        return total

    return {
        "same": all(map(torch.equal, own, added(range(world)))),
        "other order": all(map(torch.equal, own, added(range(world)[::-1]))),
        "figures": sums == [sum(each) for each in zip(*figures, strict=True)],
        "calls": tally["calls"],
        "bytes": tally["num_bytes"],
        "own bytes": sum(4 * part.numel() for part in own),
    }


def adapter_numbers(name: str) -> int:
    """How many a job's adapter has."""
    weights = SuperModel(base_model()).new_adapter(spec_of(name))
    return sum(pair.a.numel() + pair.b.numel() for pair in weights.values())
