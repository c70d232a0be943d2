"""How the ranks of one attempt find each other in a store that remembers earlier ones.

A launcher that starts ranks again keeps its store, which has the addresses of those that are gone.
How often it did so no rank can tell by itself: over several nodes each launcher counts its own
restarts only. So rank 0 thinks of a name for the attempt, and tells it to whoever asks.
"""

import time
from uuid import uuid4

import torch.distributed as dist

LOOK_S = 0.02
"""Between two looks for ranks that ask."""


def meet(store: dist.Store, rank: int, world: int, *, timeout_s: float) -> dist.Store:
    """A part of the store in which nobody was before; the same for all ranks, each of which must
    call this."""
    name = _tell(store, world, timeout_s) if rank == 0 else _ask(store, rank)
    return dist.PrefixStore(f"tlora/{name}", store)


def _ask(store: dist.Store, rank: int) -> str:
    token = uuid4().hex
    store.set(f"tlora/asks/{rank}", token)
    name = store.get(f"tlora/answers/{token}").decode()
    store.set(f"tlora/{name}/heard/{rank}", token)
    return name


def _tell(store: dist.Store, world: int, timeout_s: float) -> str:
    """Until every rank has heard it: a question may be one of an earlier attempt."""
    name = uuid4().hex
    until = time.monotonic() + timeout_s
    missing = list(range(1, world))
    while missing:
        if time.monotonic() > until:
            raise dist.DistStoreError(f"ranks {missing} have not come in {timeout_s:.0f} seconds")
        for rank in missing:
            if store.check([f"tlora/asks/{rank}"]):
                token = store.get(f"tlora/asks/{rank}").decode()
                store.set(f"tlora/answers/{token}", name)
        missing = [rank for rank in missing if not store.check([f"tlora/{name}/heard/{rank}"])]
        time.sleep(LOOK_S)
    return name
