"""How one rank of a group is used: told now and then for whoever looks on, and in the end."""

import time
from collections.abc import Sequence
from dataclasses import asdict

import torch.distributed as dist

from tlora.core.plan import Plan
from tlora.parallel.mesh import place_of
from tlora.runtime.executors.messages import Noted
from tlora.runtime.executors.worker import Tell
from tlora.runtime.progress import USAGE, RankUsage
from tlora.training.group_engine import GroupEngine

USAGE_S = 1.0
"""Between two tellings."""


class Figures:
    def __init__(self, engine: GroupEngine, plan: Plan, tell: Tell) -> None:
        self._engine = engine
        self._plan = plan
        self._tell = tell
        self._began = self._told = time.perf_counter()

    def begin(self) -> None:
        """Jobs are there; seconds count from here."""
        self._began = time.perf_counter()

    @property
    def tokens_per_s(self) -> float:
        return self._engine.usage.tokens / (time.perf_counter() - self._began)

    def tell_usage(self, jobs: Sequence[str]) -> None:
        now = time.perf_counter()
        if now - self._told < USAGE_S:
            return
        self._told = now
        engine = self._engine
        usage = RankUsage(
            rank=dist.get_rank(),
            ranks=dist.get_world_size(),
            jobs=tuple(jobs),
            turns=engine.usage.turns,
            empty=engine.usage.empty,
            tokens=engine.usage.tokens,
            seconds=now - self._began,
            communication_s=engine.counts.seconds,
        )
        self._tell(Noted(USAGE, time.time(), asdict(usage)))

    def tell_all(self) -> None:
        usage, place = self._engine.usage, place_of(dist.get_rank(), self._plan)
        fields = {
            "rank": dist.get_rank(),
            "replica": place.replica,
            "shard": place.shard,
            "collectives": self._engine.counts.as_json(),
            **asdict(usage),
            "utilisation": round(usage.utilisation, 4),
            "seconds": round(time.perf_counter() - self._began, 3),
        }
        self._tell(Noted("communication", time.time(), fields))
