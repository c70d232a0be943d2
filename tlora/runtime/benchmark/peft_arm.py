"""PEFT one by one: what people do without us, done well.

A warm process, the base loaded once, batches sorted by length and either padded or packed, the same
precision, threads, data and optimiser. Padding is at the end and causal attention never looks
ahead, so padded batches need no mask, which is the faster way. Setting adapters up is outside of
the clock, as it is for us; what PEFT has made for a rank is kept and filled anew for the next job
of that rank, for making it takes longer than training in a large model.

Its adapters are float32, as ours are. Under a base in half precision PEFT multiplies them in
float32; inside of autocast, as trainers run it, in the base's precision, which is slower or faster
by the size of a batch. The faster one is taken.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from transformers.modeling_utils import PreTrainedModel

from tlora.core.job import JobSpec, LoraSpec
from tlora.core.sequence import IGNORED, TokenSequence
from tlora.model.adapters import AdapterWeights
from tlora.runtime.benchmark.machine import now
from tlora.runtime.benchmark.rounds import Run
from tlora.runtime.benchmark.shapes import twin
from tlora.runtime.benchmark.workload import Done, Workload

TRIED_STEPS = 3


def is_available() -> bool:
    try:
        import peft  # noqa: F401
    except ImportError:
        return False
    return True


class PeftJobs:
    """Adapted models over one base, one for each kind of adapter; the base stays as it is."""

    def __init__(self, base: PreTrainedModel, adapters: Mapping[str, AdapterWeights]) -> None:
        self.base = base
        self.autocast = False
        self._adapters = adapters
        self._made: dict[LoraSpec, PeftJob] = {}

    def start(self, job: JobSpec) -> "PeftJob":
        """As if it had just been made."""
        if job.lora not in self._made:
            self._made[job.lora] = PeftJob(twin(self.base), job)
        adapted = self._made[job.lora]
        adapted.use_autocast(self.autocast)
        adapted.start(job, self._adapters[job.name])
        return adapted

    def choose_products(self, job: JobSpec, batch: list[TokenSequence], *, packed: bool) -> None:
        """The faster one of float32 and autocast, by a few steps of each."""
        if self.base.device.type != "cuda" or self.base.dtype == torch.float32:
            return
        seconds: dict[bool, float] = {}
        for autocast in (False, True):
            self.autocast = autocast
            try:
                seconds[autocast] = self._seconds_of_step(job, batch, packed=packed)
            except torch.OutOfMemoryError:
                seconds[autocast] = math.inf
            torch.cuda.empty_cache()
        self.autocast = seconds[True] < seconds[False]

    def _seconds_of_step(self, job: JobSpec, batch: list[TokenSequence], *, packed: bool) -> float:
        adapted = self.start(job)
        times = [now(self.base.device)]
        try:
            for _ in range(TRIED_STEPS):
                adapted.step(batch, packed=packed)
                times.append(now(self.base.device))
        finally:
            adapted.stop()
        return min(after - before for before, after in pairwise(times))


def train_one_by_one(jobs: PeftJobs, work: Workload, *, packed: bool) -> Run:
    base = jobs.base
    seconds = 0.0
    tokens = sequences = steps = 0
    for job in work.jobs:
        adapted = jobs.start(job)
        batches = batches_of(job, work.rows[job.name])
        started = now(base.device)
        for batch in batches:
            adapted.step(batch, packed=packed)
            tokens += sum(map(len, batch))
            sequences += len(batch)
            steps += 1
        seconds += now(base.device) - started
        adapted.stop()
    return Run(seconds, Done(tokens, sequences, steps))


def batches_of(job: JobSpec, rows: Sequence[TokenSequence]) -> list[list[TokenSequence]]:
    """Sorted by length; as many as the job has steps, over and over if there are fewer."""
    size, steps = job.train.batch_size, job.train.max_steps or 0
    ordered = sorted(rows, key=len)
    cut = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return [cut[i % len(cut)] for i in range(steps)]


class PeftJob:
    """One adapter on a model that is its own, with its optimiser."""

    def __init__(self, base: PreTrainedModel, job: JobSpec) -> None:
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
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.autocast = False
        self.optimiser: torch.optim.Optimizer | None = None
        self.max_grad_norm: float | None = None

    def start(self, job: JobSpec, weights: AdapterWeights) -> None:
        """A job of the same kind of adapter begins."""
        self._load(weights)
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

    def use_autocast(self, autocast: bool) -> None:
        self.autocast = autocast
        for module in self.model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                # Else inputs would go to float32 and back.
                module.cast_input_dtype_enabled = not autocast  # type: ignore[assignment]

    def step(self, batch: list[TokenSequence], *, packed: bool) -> torch.Tensor:
        """One optimiser step; the loss stays on the device."""
        assert self.optimiser is not None, "no job has begun"
        inputs = packed_inputs(batch) if packed else padded_inputs(batch)
        loss = self.loss(inputs)
        loss.backward()
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return loss.detach()

    def loss(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        on_device = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        with torch.autocast(self.device.type, self.model.dtype, enabled=self.autocast):
            return self.model(**on_device, use_cache=False).loss

    def stop(self) -> None:
        """The memory of the optimiser and of gradients that an error left is given back."""
        self.optimiser = None
        for parameter in self.parameters:
            parameter.grad = None

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
