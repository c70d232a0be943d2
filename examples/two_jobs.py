"""The whole idea, flat: two different LoRA jobs trained together on one frozen model, with no
engine.

Everything tlora does is here in its plainest form: one copy of the base, sequences of both jobs
packed into one row of tokens, adapters applied to their own rows only, each job's own mean loss,
its own clipping, its own AdamW, and no lock-step: job "small" steps after every pass, job "large"
when its batch of four is through. At the end each job has the adapter it would have got alone, and
the script checks that.

    python examples/two_jobs.py
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

VOCABULARY, WIDTH, LAYERS = 61, 32, 2


@dataclass
class Job:
    name: str
    rank: int
    learning_rate: float
    batch_size: int
    sequences_per_pass: int
    seed: int
    adapters: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(LAYERS):
            a = torch.randn(self.rank, WIDTH, generator=generator) / WIDTH**0.5
            b = torch.zeros(WIDTH, self.rank)
            self.adapters.append((a.requires_grad_(), b.requires_grad_()))
        self.data = [
            torch.randint(0, VOCABULARY, (5 + i % 7,), generator=generator) for i in range(12)
        ]
        parameters = [matrix for pair in self.adapters for matrix in pair]
        self.optimiser = torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=0.0)
        self.at = 0
        self.waiting = self.next_batch()

    def next_batch(self) -> list[torch.Tensor]:
        """The job's next sequences, in its own order; their number of targets is known in
        advance."""
        batch = [self.data[(self.at + i) % len(self.data)] for i in range(self.batch_size)]
        self.at += self.batch_size
        self.targets = sum(len(sequence) - 1 for sequence in batch)
        self.loss = 0.0
        return batch

    def step(self) -> None:
        parameters = self.optimiser.param_groups[0]["params"]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.losses.append(self.loss)
        self.waiting = self.next_batch()


@dataclass
class Backbone:
    """Frozen: an embedding, linears with causal mixing between them, and the embedding again."""

    embedding: torch.Tensor
    linears: list[torch.Tensor]

    @classmethod
    def new(cls) -> "Backbone":
        generator = torch.Generator().manual_seed(0)
        embedding = torch.randn(VOCABULARY, WIDTH, generator=generator) / 2
        linears = [
            torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(LAYERS)
        ]
        return cls(embedding, linears)


def mix(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Each token becomes the mean of its own sequence up to itself: no sequence sees another."""
    counts = [torch.arange(1, length + 1)[:, None] for length in lengths]
    return torch.cat([part.cumsum(0) / n for part, n in zip(x.split(lengths), counts, strict=True)])


def forward(backbone: Backbone, shares: list[tuple[Job, list[torch.Tensor]]]) -> torch.Tensor:
    """Logits of all sequences of all jobs in one packed row of tokens."""
    sequences = [sequence for _, share in shares for sequence in share]
    lengths = [len(sequence) for sequence in sequences]
    x = backbone.embedding[torch.cat(sequences)]
    for layer, weight in enumerate(backbone.linears):
        x = mix(x, lengths)
        y = x @ weight.T  # one product for everybody
        segments, start = [], 0
        for job, share in shares:  # and each job's adapter on its own rows
            rows = slice(start, start + sum(len(sequence) for sequence in share))
            a, b = job.adapters[layer]
            segments.append(y[rows] + x[rows] @ a.T @ b.T)
            start = rows.stop
        x = x + torch.tanh(torch.cat(segments))
    return x @ backbone.embedding.T


def run_pass(backbone: Backbone, jobs: list[Job]) -> None:
    """One nano-batch: a share of each job's current batch, forward, backward; steps where due."""
    shares = [(job, job.waiting[: job.sequences_per_pass]) for job in jobs]
    logits = forward(backbone, shares)
    start, total = 0, torch.zeros(())
    for job, share in shares:
        for sequence in share:
            rows = logits[start : start + len(sequence) - 1]
            # The mean over the job's own batch, however that batch is cut into passes.
            loss = F.cross_entropy(rows, sequence[1:], reduction="sum") / job.targets
            job.loss += float(loss.detach())
            total = total + loss
            start += len(sequence)
    total.backward()
    for job, share in shares:
        job.waiting = job.waiting[len(share) :]
        if not job.waiting:
            job.step()


def small() -> Job:
    return Job("small", rank=2, learning_rate=1e-2, batch_size=1, sequences_per_pass=1, seed=1)


def large() -> Job:
    return Job("large", rank=8, learning_rate=2e-2, batch_size=4, sequences_per_pass=2, seed=2)


def train(jobs: list[Job], passes: int) -> list[Job]:
    backbone = Backbone.new()
    for _ in range(passes):
        run_pass(backbone, jobs)
    return jobs


def main() -> None:
    together = train([small(), large()], passes=120)
    alone = [train([small()], passes=120)[0], train([large()], passes=120)[0]]
    for fused, solo in zip(together, alone, strict=True):
        furthest = max(abs(p - q) for p, q in zip(fused.losses, solo.losses, strict=True))
        assert furthest < 1e-4, f"{fused.name} was disturbed by its neighbour: {furthest}"
        epoch = len(fused.data) // fused.batch_size
        first, last = (sum(part) / epoch for part in (fused.losses[:epoch], fused.losses[-epoch:]))
        print(
            f"{fused.name}: {len(fused.losses)} steps, loss {first:.3f} in the first epoch, "
            f"{last:.3f} in the last, at most {furthest:.1e} from training alone"
        )


if __name__ == "__main__":
    main()
