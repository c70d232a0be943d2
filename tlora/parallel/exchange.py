"""Short texts from every rank to every rank, for what happens seldom. As bytes of a fixed number:
nothing that a rank receives is ever unpickled."""

import torch
import torch.distributed as dist

from tlora.parallel.counting import Counts, Purpose, gather_into

MOST_BYTES = 4096


def exchange(text: str, *, counts: Counts, purpose: Purpose = Purpose.FIGURES) -> list[str]:
    """By rank; what is longer is cut."""
    data = text.encode()[:MOST_BYTES]
    own = torch.zeros(MOST_BYTES, dtype=torch.uint8)
    own[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    gathered = torch.empty(dist.get_world_size() * MOST_BYTES, dtype=torch.uint8)
    gather_into(gathered, own)
    counts.add(purpose, gathered.numel())
    return [
        bytes(part.tolist()).rstrip(b"\0").decode(errors="ignore")
        for part in gathered.view(-1, MOST_BYTES)
    ]
