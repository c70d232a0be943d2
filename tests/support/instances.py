"""Small instances whose best grouping can be found by trying all, and how near to it ours comes."""

import random
from typing import NamedTuple

from support.exact import best_worth
from support.scheduling import costs_of, request
from tlora.core.cluster import uniform_cluster
from tlora.core.event import Arrival
from tlora.core.request import JobRequest
from tlora.core.state import State
from tlora.schedule.board import Board
from tlora.schedule.pieces import pieces_of
from tlora.schedule.tlora import Tlora


class Kind(NamedTuple):
    """What instances are drawn from."""

    gpus: tuple[int, ...]
    fewest: int
    """Jobs; eight at most."""

    bounds: tuple[float, ...]
    priorities: tuple[float, ...]


USUAL = Kind((1, 2, 3, 4, 6, 8), 1, (1.0, 1.5, 1.5, 1.5, 2.0), (1.0,))
HARD = Kind((1, 2, 3, 4), 5, (1.0, 1.25, 1.5, 2.0, 2.5, 3.0), (0.5, 1.0, 2.0, 4.0))
"""More jobs than GPUs, of which some may be slowed much and some not at all, and which are due very
different parts."""


def instance(seed: int, kind: Kind = USUAL) -> tuple[list[JobRequest], int]:
    """Jobs of two bases on the GPUs of a node."""
    draw = random.Random(seed)
    gpus = draw.choice(kind.gpus)
    jobs: list[JobRequest] = []
    for i in range(draw.randint(kind.fewest, 8)):
        brings = draw.choice([1, 1, 1, 2, 4, 8])
        batch = max(brings, draw.choice([1, 2, 4, 8]))
        jobs.append(
            request(
                f"j{i}",
                base=draw.choice(["llama", "llama", "qwen"]),
                rank=draw.choice([2, 4, 8, 16, 64]),
                batch=batch,
                length=draw.choice([128, 256, 512, 512, 1024, 2048]),
                gpus=brings,
                slowdown_bound=draw.choice(kind.bounds),
                # Nothing is drawn where there is no choice.
                priority=draw.choice(kind.priorities) if len(kind.priorities) > 1 else 1.0,
            )
        )
    return jobs, gpus


def gap(jobs: list[JobRequest], gpus: int) -> float:
    """To the best there is, in GPUs' worth; or the part of the jobs that could run and do not,
    where that is more."""
    cluster = uniform_cluster(gpus)
    costs = costs_of(cluster)
    state = State(cluster)
    for job in jobs:
        state.happen(Arrival(0.0, job))
    pieces = pieces_of(state, costs)
    most, best = best_worth(costs, cluster, list(pieces.values()))
    for decision in Tlora(costs).decide(state, []):
        state.apply(decision)
    board = Board(state, costs, pieces_of(state, costs))
    missing = (most - board.running) / len(jobs)
    return max(missing, 1 - board.worth / best if best else 0.0)
