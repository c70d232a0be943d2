"""What goes wrong on a rank, on purpose."""

import torch
import torch.distributed as dist

from support.rank_jobs import STEPS
from tlora.parallel.lock_step import Standing
from tlora.training.group_engine import GroupEngine


def break_at(engine: GroupEngine, number: int, place: str, fault: str, breaks: list[str]):
    """An exception in the middle of the forward or the backward of the first training nano-batch
    with work from that number on; with `fault` "joining" of the first one without. "memory" makes
    it one for want of that, "joining, memory" both, and a job's name one for want of memory in
    every nano-batch of that job. "ending": before the nano-batch of the turn at which all are
    through with the last evaluation of a job that spans ranks."""
    from tlora.model.linear import SharedInput

    seen = {"passes": 0, "inside": False}
    original_launch, original_join = engine._launch, engine._join_without_work
    middle = engine.super_model.groups[len(engine.super_model.groups) // 2]
    original = SharedInput._compute
    joining = fault.startswith("joining")
    for_ever = fault in STEPS
    error: Exception = RuntimeError("broken on purpose")
    if for_ever or fault.endswith("memory"):
        error = torch.OutOfMemoryError("out of memory on purpose")

    def launch(launched, composition):
        seen["passes"] += 1
        jobs = [pick.job for pick in composition.picks]
        if fault == "ending" and not breaks and ends_now(engine):
            breaks.append(place)
            raise error
        seen["inside"] = fault in ("", "memory") or fault in jobs
        try:
            original_launch(launched, composition)
        finally:
            seen["inside"] = False

    def join(kind):
        seen["passes"] += 1
        seen["inside"] = joining
        try:
            original_join(kind)
        finally:
            seen["inside"] = False

    def fail(*_) -> None:
        raise error

    def compute(self, x):
        outputs = original(self, x)
        due = seen["inside"] and seen["passes"] >= number and outputs[0].requires_grad
        if self is middle and due and (for_ever or not breaks):
            breaks.append(place)
            if place == "forward":
                fail()
            outputs[0].register_hook(fail)
        return outputs

    engine._launch, engine._join_without_work = launch, join
    SharedInput._compute = compute

    def undo() -> None:
        SharedInput._compute = original

    return undo


def ends_now(engine: GroupEngine) -> bool:
    """Some job that spans ranks has come to its end, by the last agreement."""
    assert engine.verdict is not None
    return any(
        standing is Standing.READY and engine.step(job.name) == STEPS[job.name]
        for job, standing in zip(engine._spanning(), engine.verdict.standings, strict=True)
    )


def break_twin(twin: str):
    """Something about jobs that span ranks is done wrong; how to set it right again."""
    from tlora.training import group_engine, optimiser

    right_sum, right_norm = group_engine.sum_in_order, optimiser.gradient_norm
    right_own = group_engine.Part.own

    def twice(tensors, figures, **settings):
        sums = right_sum(tensors, figures, **settings)
        for tensor in tensors:
            tensor *= dist.get_world_size()
        return sums

    def not_at_all(tensors, figures, **settings):
        return right_sum([], figures, **settings)

    norms: list[torch.Tensor] = []

    def of_one_rank(tensors, figures, **settings):
        if tensors:
            norms.append(torch.linalg.vector_norm(torch.stack([t.norm() for t in tensors])))
        return right_sum(tensors, figures, **settings)

    def all_of_it(self, lengths, *, first):
        return [True] * len(lengths)

    if twin == "summed twice":
        group_engine.sum_in_order = twice
    elif twin == "not summed":
        group_engine.sum_in_order = not_at_all
    elif twin == "norm of one rank":
        group_engine.sum_in_order = of_one_rank
        optimiser.gradient_norm = lambda rows: norms.pop(0) if norms else right_norm(rows)
    elif twin == "every rank runs all":
        group_engine.Part.own = all_of_it
    else:
        raise ValueError(twin)

    def undo() -> None:
        group_engine.sum_in_order, optimiser.gradient_norm = right_sum, right_norm
        group_engine.Part.own = right_own

    return undo
