"""Processes that stay for a whole test session and form groups of ranks: starting one takes far
longer than what a test asks of it."""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tlora.runtime.group.supervisor import hold_port

ANSWER_S = 600.0


class Ranks:
    """Up to `most` ranks, all on this machine, over gloo."""

    def __init__(self, most: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["support.rank_work"])
        # The server process imports from where this one does.
        folders = os.pathsep.join(path for path in sys.path if path)
        os.environ["PYTHONPATH"] = folders
        self._connections: list[Connection] = []
        self._processes = []
        self._group = (0, 0)
        """How many groups there were, and the ranks of the last one."""

        self._meeting = hold_port()
        """Where those meet."""

        for _ in range(most):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def call(self, work: Callable[..., Any], world: int, **settings: Any) -> list[Any]:
        """What `work(**settings)` returns on each of `world` ranks."""
        if self._group[1] != world:
            self._group = (self._group[0] + 1, world)
            self._meeting.close()
            self._meeting = hold_port()
        port = self._meeting.getsockname()[1]
        for rank, connection in enumerate(self._connections[:world]):
            connection.send((work, rank, self._group, port, settings))
        answers = []
        for rank, connection in enumerate(self._connections[:world]):
            assert connection.poll(ANSWER_S), f"rank {rank} does not answer"
            ok, answer = connection.recv()
            if not ok:
                self._group = (self._group[0], 0)
                raise AssertionError(f"rank {rank}: {answer}")
            answers.append(answer)
        return answers

    def close(self) -> None:
        self._meeting.close()
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()


def serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    from support import rank_jobs

    torch.set_num_threads(1)
    entered = (0, 0)
    while True:
        try:
            work, rank, group, port, settings = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            if entered != group:
                # Models in shards belong to the group that they were made in.
                rank_jobs.sharded_model.cache_clear()
                if dist.is_initialized():
                    dist.destroy_process_group()
                dist.init_process_group(
                    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=group[1]
                )
                entered = group
            connection.send((True, work(**settings)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
