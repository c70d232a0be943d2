"""The policies by name, with the kernel that each one's groups run with."""

from collections.abc import Callable
from dataclasses import dataclass

from tlora.core.errors import SpecError
from tlora.costs.groups import Costs
from tlora.costs.rounds import Kernel
from tlora.schedule.fifo import FifoMemory
from tlora.schedule.makespan import Makespan
from tlora.schedule.policy import Policy
from tlora.schedule.settings import Settings
from tlora.schedule.solo import Solo
from tlora.schedule.srtf import Srtf
from tlora.schedule.tlora import Tlora


@dataclass(frozen=True, slots=True)
class Entry:
    make: Callable[[Costs, Settings], Policy]
    kernel: Kernel
    """Build the costs of this policy, and of the executor that it drives, with this one."""

    summary: str
    is_bound: bool = False
    """It is there to show what perfect knowledge would reach: simulations give it the true costs,
    whatever the predictor's error."""


POLICIES: dict[str, Entry] = {
    "tlora": Entry(Tlora, "fused", "grouped by residual capacity, bounds holding"),
    "solo": Entry(lambda costs, _: Solo(costs), "fused", "each job alone on its GPUs, FIFO"),
    "fifo-memory": Entry(FifoMemory, "unfused", "mLoRA: in order of arrival while memory permits"),
    "tlora-no-scheduler": Entry(
        lambda costs, settings: FifoMemory(costs, settings, "tlora-no-scheduler"),
        "fused",
        "mLoRA's grouping, our kernel",
    ),
    "tlora-no-kernel": Entry(
        lambda costs, settings: Tlora(costs, settings, "tlora-no-kernel"),
        "unfused",
        "our grouping, adapters in a loop",
    ),
    "srtf": Entry(
        lambda costs, _: Srtf(costs),
        "fused",
        "shortest remaining time first, alone: a bound",
        is_bound=True,
    ),
    "makespan": Entry(
        lambda costs, _: Makespan(costs), "fused", "ALTO between tasks: least time for all"
    ),
}


def make_policy(name: str, costs: Costs, settings: Settings | None = None) -> Policy:
    if name not in POLICIES:
        raise SpecError(f"'{name}' is none of {', '.join(POLICIES)}", field="--policy")
    return POLICIES[name].make(costs, settings or Settings())
