"""A run of several ranks that this process starts and watches; it goes on under a smaller plan when
one is lost."""

from collections.abc import Callable
from pathlib import Path

from tlora.core.job import RunSpec
from tlora.core.plan import Plan
from tlora.parallel.mesh import shares_gpus
from tlora.runtime.devices import check_count
from tlora.runtime.elastic.roll import Again
from tlora.runtime.group.supervisor import Ranks
from tlora.runtime.group.whole import Whole
from tlora.runtime.interrupts import interruptible
from tlora.runtime.live import choose_progress
from tlora.runtime.progress import Progress
from tlora.runtime.scheduled import over_devices
from tlora.runtime.threads import using_threads
from tlora.runtime.training import RunResult


def train_in_group(
    spec: RunSpec,
    *,
    output: Path | str,
    plan: Plan,
    fresh: bool = False,
    profile: str | None = None,
    progress: Progress | None = None,
    on_start: Callable[[Ranks], None] = lambda ranks: None,
    again: Again | None = None,
) -> RunResult:
    """As `training.train`, with a process for each rank of the plan. When a rank is lost, the jobs
    go on from their checkpoints under a smaller plan that fits; what fits is told by the profile,
    as it is where plans are chosen."""
    progress = progress or choose_progress()
    whole = Whole(spec, plan, Path(output), progress)
    check_count(whole.device, plan.gpus, share=shares_gpus(), field="--plan")
    threads = None if whole.device.type == "cuda" else 1
    if again is None:
        again = Again(options=over_devices(plan.gpus, profile=profile))
    try:
        # As ranks have them: which bits hold may depend on it.
        with using_threads(threads):
            whole.begin(fresh=fresh, again=again)
        with interruptible(on_first=progress.on_interrupt) as interrupt:
            while whole.begin_group(interrupt) and not interrupt():
                current = whole.plan
                progress.say(f"{current.gpus} rank{'s' * (current.gpus > 1)}: {current}")
                ranks = Ranks(
                    current,
                    whole.directory.root.resolve(),
                    whole.unfinished(),
                    threads=threads,
                )
                try:
                    on_start(ranks)
                    loss = ranks.watch(whole.hear, interrupt, whole.commands)
                finally:
                    ranks.close()
                if loss is not None:
                    whole.follow(str(loss), profile)
                elif not whole.floor.was_asked_for_more(interrupt):
                    break
            stopped = interrupt.asked and bool(whole.unfinished())
        return whole.finish(interrupted=stopped)
    finally:
        whole.close()
