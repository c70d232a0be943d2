"""A tiny random Llama, jobs on it, and a driver that feeds an engine from lists of batches."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tlora.core.errors import JobFailed
from tlora.core.job import DataSpec, EvalSpec, JobSpec, LoraSpec, TrainSpec
from tlora.core.sequence import IGNORED, TokenSequence
from tlora.model.adapters import AdapterWeights
from tlora.model.super_model import SuperModel
from tlora.training.engine import Engine
from tlora.training.optimiser import AdamW
from tlora.training.outcome import EvaluationDone, Outcome, StepDone

VOCABULARY = 64
RARE = VOCABULARY - 1
"""A token that random sequences never hold."""

STEADY = AdamW(epsilon=1e-3)
"""An epsilon of the size of a gradient: otherwise Adam makes a whole step of one that is next to
nothing, and with it of its rounding."""


def tiny_llama(seed: int = 0, **settings: object) -> LlamaForCausalLM:
    """`settings`: of its config, besides those here."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.1,
        **settings,
    )
    return LlamaForCausalLM(config)


def tiny_super_model(
    *,
    gradient_checkpointing: bool = False,
    reserve_rows: int = 64,
    per_sequence: bool = False,
) -> SuperModel:
    return SuperModel(
        tiny_llama(),
        gradient_checkpointing=gradient_checkpointing,
        reserve_rows=reserve_rows,
        per_sequence=per_sequence,
    )


def tiny_engine(budget_tokens: int = 128, *, gradient_checkpointing: bool = False) -> Engine:
    model = tiny_super_model(gradient_checkpointing=gradient_checkpointing)
    return Engine(model, budget_tokens=budget_tokens)


def sequence(tokens: Sequence[int], *, prompt: int = 0, origin: str = "") -> TokenSequence:
    """The first `prompt` tokens are not trained on."""
    ids = np.array(tokens, dtype=np.int32)
    labels = ids.copy()
    labels[:prompt] = IGNORED
    return TokenSequence(ids, labels, origin)


def sequences(
    seed: int, count: int, *, shortest: int = 4, longest: int = 24, name: str = "rows"
) -> list[TokenSequence]:
    """Random rows, about a third of each a prompt."""
    generator = np.random.default_rng(seed)
    found = []
    for line in range(count):
        length = int(generator.integers(shortest, longest + 1))
        tokens = generator.integers(1, RARE, length)
        prompt = int(generator.integers(0, length * 2 // 3))
        found.append(sequence(tokens, prompt=prompt, origin=f"{name}:{line + 1}"))
    return found


def spec(
    name: str = "job",
    *,
    lora: dict | None = None,
    train: dict | None = None,
    evaluation: dict | None = None,
) -> JobSpec:
    return JobSpec(
        name=name,
        data=DataSpec(path="in memory"),
        lora=LoraSpec(**{"r": 4, "lora_alpha": 8.0, **(lora or {})}),
        train=TrainSpec(
            **{"learning_rate": 1e-2, "batch_size": 4, "max_steps": 4, **(train or {})}
        ),
        # Drivers are handed their held-out rows; patience wants to know of some.
        eval=EvalSpec(**{"split": 1, **(evaluation or {})}),
    )


@dataclass
class Fed:
    """A job for the engine's inner interface: its batches, all known beforehand."""

    name: str
    batches: list[list[TokenSequence]]
    rank: int = 4
    dropout: float = 0.0
    learning_rate: float = 1e-2
    max_grad_norm: float | None = 1.0
    weight: float = 1.0
    optimiser: AdamW = STEADY

    steps: list[StepDone] = field(default_factory=list)
    failure: JobFailed | None = None

    @property
    def spec(self) -> JobSpec:
        return spec(self.name, lora={"r": self.rank}, train={"seed": 7})

    @property
    def over(self) -> bool:
        return self.failure is not None or len(self.steps) == len(self.batches)

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    def attach(self, engine: Engine, **options: object) -> None:
        options.setdefault("weights", engine.super_model.new_adapter(self.spec))
        engine.attach(
            self.name,
            scale=2.0,
            dropout=self.dropout,
            seed=7,
            weight=self.weight,
            optimiser=self.optimiser,
            **options,
        )

    def feed(self, engine: Engine) -> None:
        """The next batch, and the wish for its step."""
        batch = self.batches[len(self.steps)]
        scale = 1.0 / sum(each.num_targets for each in batch)
        engine.feed(self.name, batch, loss_scale=scale)
        engine.request_step(
            self.name, learning_rate=self.learning_rate, max_grad_norm=self.max_grad_norm
        )


def batches(seed: int, sizes: Iterable[int], **options: object) -> list[list[TokenSequence]]:
    return [sequences(1000 * seed + i, size, **options) for i, size in enumerate(sizes)]


def drive(
    engine: Engine,
    jobs: list[Fed],
    *,
    limit: int = 2_000,
    before: Callable[[int], None] | None = None,
) -> Iterator[Outcome]:
    """Run attached jobs until each is over, auditing the engine's books after every nano-batch;
    `before` is told the number of each nano-batch."""
    fed = {job.name: -1 for job in jobs}
    for number in range(limit):
        for job in jobs:
            if not job.over and job.name in engine.jobs and fed[job.name] < len(job.steps):
                job.feed(engine)
                fed[job.name] = len(job.steps)
        if not engine.has_work():
            return
        if before is not None:
            before(number)
        outcome = engine.run_nano_batch()
        engine.check_integrity()
        for job in jobs:
            job.steps += [step for step in outcome.steps if step.job == job.name]
            failures = [each for each in outcome.failures if each.job == job.name]
            job.failure = failures[0] if failures else job.failure
        yield outcome
    raise AssertionError(f"not over after {limit} nano-batches")


def train(
    engine: Engine, jobs: list[Fed], before: Callable[[int], None] | None = None
) -> list[Outcome]:
    """Attach the jobs and run them to their ends."""
    for job in jobs:
        job.attach(engine)
    return list(drive(engine, jobs, before=before))


def base_loss(rows: list[TokenSequence]) -> float:
    """The mean over all trained tokens by the plain model, one row at a time."""
    model, total, count = tiny_llama().eval(), 0.0, 0
    for row in rows:
        ids = torch.from_numpy(row.input_ids.astype(np.int64))
        labels = torch.from_numpy(row.labels.astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
        losses = torch.nn.functional.cross_entropy(
            logits[:-1], labels[1:], reduction="sum", ignore_index=IGNORED
        )
        total += float(losses)
        count += row.num_targets
    return total / count


def evaluate(engine: Engine, name: str, rows: list[TokenSequence]) -> EvaluationDone:
    engine.evaluate(name, rows)
    while True:
        outcome = engine.run_nano_batch()
        if outcome.evaluations:
            return outcome.evaluations[0]


def distance(found: AdapterWeights, expected: AdapterWeights) -> float:
    """The largest relative difference of two adapters' matrices in the Euclidean norm; NaN where
    one has a NaN."""
    assert found.keys() == expected.keys() != set()
    pairs = [
        (getattr(found[path], side), getattr(expected[path], side))
        for path in found
        for side in ("a", "b")
    ]
    errors = [float((x - y).double().norm()) for x, y in pairs]
    sizes = [float(y.double().norm()) for _, y in pairs]
    return float(
        np.max([error and error / size for error, size in zip(errors, sizes, strict=True)])
    )


def identical(found: AdapterWeights, expected: AdapterWeights) -> bool:
    """The same bits."""
    return found.keys() == expected.keys() and all(
        torch.equal(getattr(found[path], side), getattr(expected[path], side))
        for path in found
        for side in ("a", "b")
    )
