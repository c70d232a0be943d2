"""Short texts from every rank to every rank, for what happens seldom. As bytes: nothing that a
rank receives is ever unpickled."""

import torch
import torch.distributed as dist

from tlora.parallel.counting import Counts, Purpose, gather_into


def exchange(text: str, *, counts: Counts, purpose: Purpose = Purpose.FIGURES) -> list[str]:
    """By rank."""
    with counts.timed(purpose):
        return _exchange(text, counts, purpose)


def _exchange(text: str, counts: Counts, purpose: Purpose) -> list[str]:
    data = text.encode()
    longest = torch.tensor([len(data)], dtype=torch.int64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    counts.add(purpose, longest.element_size())
    size = int(longest)
    if not size:
        return [""] * dist.get_world_size()
    own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
    gathered = torch.empty(dist.get_world_size() * size, dtype=torch.uint8)
    gather_into(gathered, own)
    counts.add(purpose, gathered.numel())
    return [bytes(part.tolist()).rstrip(b"\0").decode() for part in gathered.view(-1, size)]
