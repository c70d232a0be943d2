"""PEFT one by one: what people do without us, done well.

A warm process, the base loaded once, batches sorted by length and either padded or packed, the same
precision, threads, data and optimiser. Padding is at the end and causal attention never looks
ahead, so padded batches need no mask, which is the faster way. Making and removing adapters is
outside of the clock, as it is for us.
"""

from collections.abc import Sequence

import numpy as np
import torch
from transformers.modeling_utils import PreTrainedModel

from tlora.core.job import JobSpec
from tlora.core.sequence import IGNORED, TokenSequence
from tlora.model.adapters import AdapterWeights
from tlora.runtime.benchmark.machine import now
from tlora.runtime.benchmark.rounds import Run
from tlora.runtime.benchmark.workload import Done, Workload


def is_available() -> bool:
    try:
        import peft  # noqa: F401
    except ImportError:
        return False
    return True


def train_one_by_one(base: PreTrainedModel, work: Workload, *, packed: bool) -> Run:
    seconds = 0.0
    tokens = sequences = steps = 0
    for job in work.jobs:
        adapted = PeftJob(base, job)
        batches = batches_of(job, work.rows[job.name])
        started = now(base.device)
        for batch in batches:
            adapted.step(batch, packed=packed)
            tokens += sum(map(len, batch))
            sequences += len(batch)
            steps += 1
        seconds += now(base.device) - started
        adapted.remove()
    return Run(seconds, Done(tokens, sequences, steps))


def batches_of(job: JobSpec, rows: Sequence[TokenSequence]) -> list[list[TokenSequence]]:
    """Sorted by length; as many as the job has steps, over and over if there are fewer."""
    size, steps = job.train.batch_size, job.train.max_steps or 0
    ordered = sorted(rows, key=len)
    cut = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return [cut[i % len(cut)] for i in range(steps)]


class PeftJob:
    """One adapter on the base, with its optimiser."""

    def __init__(
        self, base: PreTrainedModel, job: JobSpec, weights: AdapterWeights | None = None
    ) -> None:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=job.lora.r,
            lora_alpha=int(job.lora.lora_alpha),
            lora_dropout=job.lora.lora_dropout,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        self.device = base.device
        self.model = get_peft_model(base, config)
        # The base's own dropout stays off, as it does in our engine.
        self.model.eval()
        for name, module in self.model.named_modules():
            if name.rpartition(".")[2] == "lora_dropout":
                module.train()
        if weights is not None:
            self._load(weights)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        train = job.train
        self.max_grad_norm = train.max_grad_norm
        self.optimiser = torch.optim.AdamW(
            self.parameters,
            lr=train.learning_rate,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_epsilon,
            weight_decay=train.weight_decay,
            fused=True,
        )

    def step(self, batch: list[TokenSequence], *, packed: bool) -> torch.Tensor:
        """One optimiser step; the loss stays on the device."""
        inputs = packed_inputs(batch) if packed else padded_inputs(batch)
        inputs = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        loss = self.model(**inputs, use_cache=False).loss
        loss.backward()
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return loss.detach()

    def remove(self) -> None:
        """The base is as it was before."""
        self.model.unload()

    @torch.no_grad()
    def _load(self, weights: AdapterWeights) -> None:
        for path, pair in weights.items():
            layer = self.model.get_submodule(f"base_model.model.{path}")
            layer.lora_A["default"].weight.copy_(pair.a)  # type: ignore[index,union-attr]
            layer.lora_B["default"].weight.copy_(pair.b)  # type: ignore[index,union-attr]


def padded_inputs(batch: Sequence[TokenSequence]) -> dict[str, torch.Tensor]:
    """A row per sequence, padded at the end to the longest; padding carries no loss."""
    longest = max(map(len, batch))
    ids = np.zeros((len(batch), longest), dtype=np.int64)
    labels = np.full((len(batch), longest), IGNORED, dtype=np.int64)
    for i, row in enumerate(batch):
        ids[i, : len(row)] = row.input_ids
        labels[i, : len(row)] = row.labels
    return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def packed_inputs(batch: Sequence[TokenSequence]) -> dict[str, torch.Tensor]:
    """One row; transformers sees from the positions where a sequence begins. The first token of
    each is nobody's target."""
    ids = np.concatenate([row.input_ids for row in batch]).astype(np.int64)
    labels = np.concatenate([row.labels for row in batch]).astype(np.int64)
    labels[np.cumsum([0, *map(len, batch)])[:-1]] = IGNORED
    positions = np.concatenate([np.arange(len(row)) for row in batch])
    return {
        name: torch.from_numpy(values)[None]
        for name, values in (("input_ids", ids), ("labels", labels), ("position_ids", positions))
    }
