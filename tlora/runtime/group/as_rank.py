"""One rank of a group that somebody else started, torchrun say. Rank 0 does what concerns the whole
run; nobody is left to go on when one is lost, so all end, and the launcher starts them again."""

import gc
import io
import json
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import torch.distributed as dist

from tlora.config import load_plan
from tlora.core.errors import SpecError, TloraError
from tlora.core.job import RunSpec
from tlora.core.plan import Plan
from tlora.parallel.counting import Counts
from tlora.parallel.exchange import exchange
from tlora.parallel.mesh import check_runs, join
from tlora.parallel.sharding import follows_another
from tlora.runtime.elastic.roll import Again
from tlora.runtime.group.heartbeat import Heartbeat
from tlora.runtime.group.plans import plan_as_json
from tlora.runtime.group.rank import run_rank
from tlora.runtime.group.whole import Whole
from tlora.runtime.interrupts import interruptible
from tlora.runtime.live import choose_progress
from tlora.runtime.progress import ProgressLines
from tlora.runtime.training import RunResult


def train_as_rank(
    spec: RunSpec,
    *,
    output: Path | str,
    plan: Plan,
    fresh: bool = False,
    attempt: int = 0,
    again: Again,
) -> RunResult:
    """All ranks see the same directory. When one hangs or raises, all of them end, and the cause is
    said and on record. `attempt` is what this rank's launcher says: above 0 it has started its
    ranks again, and nothing starts over."""
    join(spec.engine.device)
    check_runs(plan, dist.get_world_size())
    name, is_first = compare(plan, attempt)
    rank, world = dist.get_rank(), dist.get_world_size()
    progress = choose_progress() if rank == 0 else ProgressLines(io.StringIO())
    whole = Whole(spec, plan, Path(output), progress, leads=rank == 0, tries_again=is_first)
    beats = Heartbeat(rank, world, name=name, lost=whole.lost)
    try:
        result = train_together(whole, rank, fresh=fresh and is_first, again=again)
        # Nobody leaves while others need it. Still watched: a rank may be lost right here.
        dist.barrier()
    except Exception as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        follows = follows_another(error)
        if not isinstance(error, TloraError) and not follows:
            whole.lost(f"rank {rank}: {what}")
        beats.close(broken=True)
        if follows:
            raise TloraError(
                f"rank {rank} has lost the others ({what}); the group ends, the same command goes "
                "on"
            ) from error
        raise
    finally:
        beats.close()
    dist.destroy_process_group()
    return result


class RefusedByRank0(TloraError):
    """Which says why."""


class Common(NamedTuple):
    """What all ranks see alike."""

    name: str
    """Of the group, and of no other."""

    is_first: bool
    """No launcher has started its ranks again: over several nodes some may have, and others not."""


def compare(plan: Plan, attempt: int) -> Common:
    """Each has come to its plan by itself. Raises SpecError if they are not the same."""
    own = {"plan": plan_as_json(plan), "attempt": attempt, "name": uuid4().hex}
    told = [json.loads(text) for text in exchange(json.dumps(own), counts=Counts())]
    for rank, each in enumerate(told):
        if each["plan"] != told[0]["plan"]:
            raise SpecError(
                f"rank 0 has '{load_plan(told[0]['plan'])}' and rank {rank} "
                f"'{load_plan(each['plan'])}': name the same file on all nodes",
                field="--plan",
            )
    return Common(told[0]["name"], not any(each["attempt"] for each in told))


def train_together(whole: Whole, rank: int, *, fresh: bool, again: Again) -> RunResult:
    """Until every job is over and nobody asks for more, or a person stops it."""
    refusal: TloraError | None = None
    if rank == 0:
        try:
            whole.begin(fresh=fresh, again=again)
        except TloraError as error:
            refusal = error
    if tell_all(refusal is not None):
        raise refusal or RefusedByRank0
    with interruptible(on_first=whole.progress.on_interrupt) as interrupt:
        goes_on, stops = True, False
        while goes_on:
            if rank == 0:
                whole.begin_group(interrupt)
            dist.barrier()
            whole.look_again()
            jobs = whole.unfinished()
            if jobs:
                tell = whole.hear_all if rank == 0 else whole.note
                run_rank(
                    whole.directory.root.resolve(),
                    whole.plan,
                    jobs,
                    lambda message, tell=tell: tell(rank, message),
                    should_stop=interrupt,
                    inbox=whole.commands,
                )
            whole.close_notes()
            stops = tell_all(interrupt.asked)
            if rank == 0:
                whole.end_notes()
            looks = rank == 0 and bool(jobs) and not stops
            goes_on = tell_all(looks and whole.floor.was_asked_for_more(interrupt))
            if goes_on:
                # The base is loaded once more.
                gc.collect()
        whole.look_again()
    return whole.finish(interrupted=stops and bool(whole.unfinished()))


def tell_all(said: bool) -> bool:
    """Whether any rank says so; nobody goes on before all have spoken."""
    return any(exchange("yes" if said else "", counts=Counts()))
