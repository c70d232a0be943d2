"""The yardstick: forward and backward-for-activations of the same tokens with no adapters at all.

All weights are frozen, so a gradient has to be wanted at the other end: the embeddings' output is
made to require one, and backward runs through every layer. Batches are made ready before the clock
starts.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from tlora.core.sequence import TokenSequence
from tlora.model.compiling import compile_layers
from tlora.model.packing import PackedBatch, Share, pack
from tlora.model.super_model import SuperModel
from tlora.runtime.benchmark.machine import now
from tlora.runtime.benchmark.peft_arm import packed_inputs, padded_inputs
from tlora.runtime.benchmark.rounds import Run
from tlora.runtime.benchmark.workload import (
    Done,
    Workload,
    in_batches_by_length,
    in_full_batches,
)
from tlora.training import loss

ROW_STEP = 64
"""Packed rows are padded to a multiple of this, as the engine does."""


class InputGradient:
    """Makes a model's embedded input require a gradient; the last one is kept."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.embedded: torch.Tensor | None = None
        self._hook = model.get_input_embeddings().register_forward_hook(self._require)

    def _require(self, module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        self.embedded = output.requires_grad_(True)
        return output

    def remove(self) -> None:
        self._hook.remove()
        self.embedded = None


class PlainFrozen:
    """The transformers model as it is, or with compiled layers, on padded or packed batches."""

    def __init__(
        self, model: PreTrainedModel, work: Workload, budget_tokens: int, *, packed: bool
    ) -> None:
        self.model = model.requires_grad_(False)
        self.done = _tokens_only(work)
        rows = work.sequences
        batches = (
            map(packed_inputs, in_full_batches(rows, budget_tokens))
            if packed
            else map(padded_inputs, in_batches_by_length(rows, budget_tokens))
        )
        self.batches = [
            {name: tensor.to(model.device) for name, tensor in batch.items()} for batch in batches
        ]

    @property
    def shapes_vary(self) -> bool:
        return len({batch["input_ids"].shape for batch in self.batches}) > 1

    def __call__(self) -> Run:
        gradient = InputGradient(self.model)
        started = now(self.model.device)
        for batch in self.batches:
            self.model(**batch, use_cache=False).loss.backward()
        seconds = now(self.model.device) - started
        gradient.remove()
        return Run(seconds, self.done)


class OwnFrozen:
    """Our super-model with nobody attached."""

    def __init__(self, model: SuperModel, work: Workload, budget_tokens: int) -> None:
        self.model = model
        self.done = _tokens_only(work)
        self.batches = [
            packed_for_nobody(rows, model.device)
            for rows in in_full_batches(work.sequences, budget_tokens)
        ]

    def __call__(self) -> Run:
        assert not self.model.jobs, "the frozen backbone has no adapters"
        gradient = InputGradient(self.model.model)
        started = now(self.model.device)
        for batch in self.batches:
            run_own(self.model, batch)
        seconds = now(self.model.device) - started
        gradient.remove()
        return Run(seconds, self.done)


def run_own(model: SuperModel, batch: PackedBatch) -> None:
    with model.routed(batch, train=True):
        loss.backward(model.token_losses(batch), batch.loss_scales)


def packed_for_nobody(rows: Sequence[TokenSequence], device: torch.device) -> PackedBatch:
    """Sequences of no job, with the loss of a mean."""
    count = len(rows)
    scale = 1.0 / sum(row.num_targets for row in rows)
    num_rows = -(-sum(map(len, rows)) // ROW_STEP) * ROW_STEP
    return pack([Share("", list(rows), [0] * count, [scale] * count)], num_rows, device)


def _tokens_only(work: Workload) -> Done:
    return Done(work.tokens, len(work.sequences), steps=0)


class TooSlow(Exception):
    """The time for compiling is over."""


def why_not_compiled(
    model: PreTrainedModel, run: Callable[[], object], seconds: int, *, dynamic: bool = False
) -> str | None:
    """Compile the model's layers by running it once, within a time. The reason if that is not to
    be had: what a machine may lack is a C++ compiler, its headers or Triton."""
    too_slow = f"not compiled within {seconds} s"
    started = time.monotonic()
    # A compiler that is stopped, or not there, says so at great length.
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        if not compile_layers(model, dynamic=dynamic):
            raise NotImplementedError(f"{type(model).__name__} has no layers of the usual kind")
        with time_limit(seconds):
            run()
    except TooSlow:
        return too_slow
    except Exception as error:
        # A compiler that was stopped may say something else.
        if time.monotonic() - started >= seconds:
            return too_slow
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"cannot be compiled here: {first[:120]}"
    finally:
        logging.disable(disabled)
    return None


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises TooSlow in the main thread of a Unix system; elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    # And again every few seconds: an exception may be swallowed where nobody can hear it.
    signal.setitimer(signal.ITIMER_REAL, seconds, 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
