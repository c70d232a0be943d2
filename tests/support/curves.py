"""What a job's training looks like from outside, recorded so that two ways of training compare."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tlora.core.job import JobSpec
from tlora.core.sequence import IGNORED, TokenSequence, Unit
from tlora.data.cursor import Cursor, next_batch
from tlora.kernels.streams import keep_mask, linear_key, step_key, threshold
from tlora.model.adapters import AdapterWeights, LoraPair
from tlora.model.super_model import SuperModel
from tlora.training.driver import JobDriver, Status
from tlora.training.engine import Engine
from tlora.training.learning_rate import learning_rate
from tlora.training.outcome import EvaluationDone, Outcome, StepDone

Objective = Callable[..., torch.Tensor]
"""As `token_mean`: of a PEFT model, a function that gives its sequences' summed losses, a part of
the batch, and the batch."""


@dataclass
class Curve:
    """One job's losses and gradient norms by step, and the adapter it ended with."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    adapter: AdapterWeights = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """Largest relative differences of two curves."""

    loss: float
    grad_norm: float
    adapter: float

    def within(self, limit: float) -> bool:
        """A NaN is within nothing."""
        return self.loss <= limit and self.grad_norm <= limit and self.adapter <= limit


def difference(one: Curve, other: Curve) -> Difference:
    assert len(one.losses) == len(other.losses) > 0
    assert one.adapter.keys() == other.adapter.keys() != set()

    def relative(a: list[float], b: list[float]) -> float:
        a_, b_ = np.array(a), np.array(b)
        return float((np.abs(a_ - b_) / np.abs(b_)).max())

    def distance(path: str) -> float:
        """Of the product B A, the only thing that matters of an adapter, over its own size."""
        p, q = one.adapter[path], other.adapter[path]
        expected = q.b.double() @ q.a.double()
        error = p.b.double() @ p.a.double() - expected
        return float(error.norm() / expected.norm())

    return Difference(
        loss=relative(one.losses, other.losses),
        grad_norm=relative(one.grad_norms, other.grad_norms),
        adapter=max(distance(path) for path in one.adapter),
    )


def same_bits(one: Curve, other: Curve) -> bool:
    """Losses, gradient norms and adapter to the last bit."""
    assert one.adapter.keys() == other.adapter.keys() != set()
    return (
        one.losses == other.losses
        and one.grad_norms == other.grad_norms
        and all(
            torch.equal(one.adapter[path].a, other.adapter[path].a)
            and torch.equal(one.adapter[path].b, other.adapter[path].b)
            for path in one.adapter
        )
    )


class Watcher:
    """An observer that records every job's curve."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.curves: dict[str, Curve] = {}
        self.failed: dict[str, str] = {}

    def on_nano_batch(self, outcome: Outcome) -> None:
        assert outcome.error is None, outcome.error

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        curve = self.curves.setdefault(driver.name, Curve())
        curve.losses.append(done.loss)
        curve.grad_norms.append(done.grad_norm)

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        pass

    def on_end(self, driver: JobDriver) -> None:
        if driver.status is Status.FAILED:
            self.failed[driver.name] = driver.reason or ""
        else:
            weights = self.engine.super_model.weights(driver.name)
            self.curves.setdefault(driver.name, Curve()).adapter = weights


def random_rows(seed: int, count: int, vocabulary: int, longest: int = 40) -> list[TokenSequence]:
    """Rows of mixed length whose first part is not trained on."""
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        length = int(generator.integers(3, longest + 1))
        ids = generator.integers(3, vocabulary, length).astype(np.int32)
        labels = ids.copy()
        labels[: int(generator.integers(0, length - 1))] = IGNORED
        rows.append(TokenSequence(ids, labels, f"rows:{index}"))
    return rows


def train_with_peft(
    model: torch.nn.Module,
    job: JobSpec,
    rows: Sequence[Unit],
    start: AdapterWeights,
    numbers: dict[str, int],
    *,
    chunk: int = 4,
    objective: "Objective | None" = None,
) -> Curve:
    """The job as Hugging Face PEFT and torch's own AdamW train it, in padded batches.

    `numbers` gives each linear's number in the dropout streams: for dropout our masks are put into
    PEFT's lora_dropout modules. `model` is used up.
    """
    from peft import LoraConfig, get_peft_model

    targets = job.lora.target_modules
    config = LoraConfig(
        r=job.lora.r,
        lora_alpha=job.lora.lora_alpha,
        lora_dropout=job.lora.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        use_rslora=job.lora.use_rslora,
        task_type="CAUSAL_LM",
    )
    peft = get_peft_model(model, config)
    # The frozen model's own dropout stays off; PEFT's is ours.
    peft.eval()
    modules = {path: peft.base_model.model.get_submodule(path) for path in start}
    masks: dict[str, StreamDropout] = {}
    with torch.no_grad():
        for path, module in modules.items():
            module.lora_A["default"].weight.copy_(start[path].a)
            module.lora_B["default"].weight.copy_(start[path].b)
            if job.lora.lora_dropout:
                masks[path] = StreamDropout(job, numbers[path])
                module.lora_dropout["default"] = masks[path]
    trained = [p for p in peft.parameters() if p.requires_grad]
    train = job.train
    optimiser = torch.optim.AdamW(
        trained,
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_epsilon,
        weight_decay=train.weight_decay,
    )
    driver = JobDriver(job, rows)
    curve = Curve()
    for step, batch in enumerate(batches_of(driver, rows)):
        loss = 0.0
        first_row = 0
        # Gradient accumulation over chunks of the batch, as a user without memory would.
        for begin in range(0, len(batch), chunk):
            part = batch[begin : begin + chunk]

            def sums(units: list[Unit], step: int = step, first_row: int = first_row):
                """Each sequence's summed loss."""
                sequences = [each for unit in units for each in unit.sequences]
                ids, labels, mask, token_rows = padded(sequences, first_row)
                for dropout in masks.values():
                    dropout.enter(step, token_rows)
                logits = peft(input_ids=ids, attention_mask=mask).logits
                at_least_float32 = torch.promote_types(logits.dtype, torch.float32)
                losses = torch.nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1).to(at_least_float32),
                    labels[:, 1:].flatten(),
                    reduction="none",
                )
                return losses.view(len(sequences), -1).sum(1)

            part_loss = (objective or token_mean)(peft, sums, part, batch)
            first_row += sum(len(unit) for unit in part)
            part_loss.backward()
            loss += float(part_loss.detach())
        max_norm = train.max_grad_norm if train.max_grad_norm is not None else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(trained, max_norm)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(train, step, driver.total_steps)
        optimiser.step()
        optimiser.zero_grad()
        curve.losses.append(loss)
        curve.grad_norms.append(float(norm))
    curve.adapter = {
        path: LoraPair(
            a=module.lora_A["default"].weight.detach().clone(),
            b=module.lora_B["default"].weight.detach().clone(),
        )
        for path, module in modules.items()
    }
    return curve


def token_mean(peft, sums, part: list[Unit], batch: list[Unit]) -> torch.Tensor:
    """What a part of the batch adds to the mean over the batch's trained tokens."""
    return sums(part).sum() / sum(unit.num_targets for unit in batch)


class StreamDropout(torch.nn.Module):
    """Our dropout stream as a module for PEFT: [sequences, length, features] in padded rows."""

    def __init__(self, job: JobSpec, number: int) -> None:
        super().__init__()
        self.job = job
        self.number = number
        self.rows = torch.zeros(0)
        self.key = 0

    def enter(self, step: int, rows: torch.Tensor) -> None:
        self.rows = rows
        self.key = linear_key(step_key(self.job.train.seed, step), self.number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        limit = threshold(self.job.lora.lora_dropout)
        kept = keep_mask(self.rows.flatten(), x.shape[-1], key=self.key, threshold=limit)
        return x * kept.view(x.shape) / (1.0 - self.job.lora.lora_dropout)


def batches_of(driver: JobDriver, rows: Sequence[Unit]) -> Iterator[list[Unit]]:
    """The job's batches in its own data order."""
    cursor = Cursor()
    train = driver.spec.train
    for _ in range(driver.total_steps):
        indices, cursor = next_batch(cursor, len(rows), train.batch_size, train.seed)
        yield [rows[int(index)] for index in indices]


def padded(batch: list[TokenSequence], first_row: int):
    """Right-padded tensors, and each token's place in the job's batch."""
    longest = max(len(sequence) for sequence in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    labels = torch.full((len(batch), longest), IGNORED, dtype=torch.int64)
    mask = torch.zeros(len(batch), longest, dtype=torch.int64)
    rows = torch.zeros(len(batch), longest, dtype=torch.int32)
    for i, sequence in enumerate(batch):
        length = len(sequence)
        ids[i, :length] = torch.from_numpy(sequence.input_ids)
        labels[i, :length] = torch.from_numpy(sequence.labels)
        mask[i, :length] = 1
        rows[i, :length] = torch.arange(first_row, first_row + length)
        first_row += length
    return ids, labels, mask, rows


def linear_numbers(model: SuperModel) -> dict[str, int]:
    """Each linear's number in the dropout streams."""
    return {
        target.path: number
        for group in model.groups
        for target, number in zip(group.pool.targets, group.numbers, strict=True)
    }
