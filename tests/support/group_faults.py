"""A rank's process with a fault in it."""

from typing import Any

from tlora.runtime.group import supervisor

serve = supervisor.serve


def raising(connection, directory, plan, jobs, rank, *more: Any) -> None:
    """Rank 1 of two raises at its sixth agreement."""
    from tlora.training.group_engine import GroupEngine

    agree, turns = GroupEngine._agree, [0]

    def failing(self):
        turns[0] += 1
        if rank == 1 and plan["replicas"] * plan["fsdp"] == 2 and turns[0] == 6:
            raise OSError("a cable was pulled")
        return agree(self)

    GroupEngine._agree = failing
    serve(connection, directory, plan, jobs, rank, *more)
