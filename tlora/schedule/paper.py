"""A plan on paper: a named base, so many GPUs, and jobs of a usual kind; nothing is loaded."""

from dataclasses import dataclass
from typing import Any

from tlora.core.cluster import LINKS, uniform_cluster
from tlora.core.errors import SpecError
from tlora.core.load import JobLoad
from tlora.core.records import as_json
from tlora.core.request import JobRequest
from tlora.costs.extrapolate import extrapolated
from tlora.costs.groups import Costs
from tlora.costs.layout import NAMED, named_layout
from tlora.costs.profile import Profile, shipped_profiles
from tlora.schedule.planner import PlanChoice, Planner, choice_as_json

RANKS = (8, 16, 32, 64)
BATCH = 4
LENGTH = 512
JOBS_PER_GPU = 8
PROFILE = "h200-llama-8b"


@dataclass(frozen=True, slots=True)
class PaperPlan:
    shape: str
    jobs: int
    profile: Profile
    choice: PlanChoice

    @property
    def workload(self) -> str:
        return (
            f"ranks {', '.join(map(str, RANKS))} in turn on all linears, batches of {BATCH} "
            f"sequences of {LENGTH} tokens"
        )

    @property
    def links(self) -> str:
        told = ", ".join(
            f"{link.bytes_per_s / 1e9:.0f} GB/s and {link.latency_s * 1e6:.0f} us within a "
            f"{tier.name.lower()}"
            for tier, link in LINKS.items()
        )
        return f"links assumed, not measured: {told}; 8 GPUs in a node, 4 nodes in a rack"

    def as_json(self) -> dict[str, Any]:
        return {
            "v": 1,
            "kind": "paper_plan",
            "shape": self.shape,
            "jobs": self.jobs,
            "workload": self.workload,
            "device": self.profile.device,
            "notes": list(self.profile.notes),
            "links": {tier.name.lower(): as_json(link) for tier, link in LINKS.items()},
        } | choice_as_json(self.choice)


def paper_jobs(count: int, base: str) -> list[JobRequest]:
    """Ranks 8 to 64 in turn on all linears, batches of 4 sequences of 512 tokens."""
    return [
        JobRequest(
            name=f"j{place}",
            base=base,
            load=JobLoad(rank=RANKS[place % len(RANKS)], batch_size=BATCH, lengths=(LENGTH,)),
            total_steps=1000,
        )
        for place in range(count)
    ]


def paper_profile(shape: str, name: str | None = None) -> Profile:
    """The shipped profile of the shape, or that of another one carried over to it. `name` is one
    that comes with tlora."""
    layout = named_layout(shape)
    shipped = shipped_profiles()
    if name is not None and name not in shipped:
        raise SpecError(f"'{name}' is none of {', '.join(shipped)}", field="--profile")
    same = [each for each in shipped.values() if each.shape == shape]
    found = shipped[name] if name is not None else (same or [shipped[PROFILE]])[0]
    return extrapolated(found, NAMED[found.shape], layout)


def plan_on_paper(
    shape: str,
    gpus: int,
    *,
    jobs: int | None = None,
    profile: str | None = None,
    bucket: int | None = None,
) -> PaperPlan:
    """With eight jobs for each GPU where nobody says."""
    count = JOBS_PER_GPU * gpus if jobs is None else jobs
    found = paper_profile(shape, profile)
    costs = Costs({shape: found}, uniform_cluster(gpus))
    planner = Planner(costs, paper_jobs(count, shape), layout=named_layout(shape))
    return PaperPlan(shape, count, found, planner.choose(gpus, on_paper=True, bucket=bucket))
