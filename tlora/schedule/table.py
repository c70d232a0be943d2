"""The policies by name, with the kernel that each one's groups run with."""

from collections.abc import Callable
from dataclasses import dataclass

from tlora.core.errors import SpecError
from tlora.costs.groups import Costs, Kernel
from tlora.schedule.policy import Policy
from tlora.schedule.solo import Solo


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What can be set of a policy; a policy takes what it knows."""


@dataclass(frozen=True, slots=True)
class Entry:
    make: Callable[[Costs, Settings], Policy]
    kernel: Kernel
    """Build the costs of this policy, and of the executor that it drives, with this one."""

    summary: str


POLICIES: dict[str, Entry] = {
    "solo": Entry(lambda costs, _: Solo(costs), "fused", "each job alone on its GPUs, FIFO"),
}


def make_policy(name: str, costs: Costs, settings: Settings | None = None) -> Policy:
    if name not in POLICIES:
        raise SpecError(f"'{name}' is none of {', '.join(POLICIES)}", field="--policy")
    return POLICIES[name].make(costs, settings or Settings())
