"""The frozen backbone must really run backward, or the yardstick is too long."""

import signal
import time

import pytest
import torch

from tlora.runtime.benchmark import shapes
from tlora.runtime.benchmark.frozen import (
    InputGradient,
    OwnFrozen,
    PlainFrozen,
    TooSlow,
    packed_for_nobody,
    run_own,
    time_limit,
    why_not_compiled,
)
from tlora.runtime.benchmark.peft_arm import packed_inputs, padded_inputs
from tlora.runtime.benchmark.workload import Done

LONG_S = 300
"""More than any of this takes on a busy machine."""


def plain_gradient(model, inputs) -> torch.Tensor:
    gradient = InputGradient(model)
    model(**inputs, use_cache=False).loss.backward()
    assert gradient.embedded is not None and gradient.embedded.grad is not None
    found = gradient.embedded.grad
    gradient.remove()
    return found


def test_backward_reaches_the_input_and_is_the_same_in_all_arms(plain, ours, work) -> None:
    """Padded, packed and our own give one gradient of the embedded input; one with a sequence
    missing is another."""
    model = shapes.twin(plain).requires_grad_(False)
    rows = work.sequences[:4]
    packed = plain_gradient(model, packed_inputs(rows))[0]
    padded = plain_gradient(model, padded_inputs(rows))
    padded = torch.cat([padded[i, : len(row)] for i, row in enumerate(rows)])
    gradient = InputGradient(ours.model)
    run_own(ours, packed_for_nobody(rows, ours.device))
    assert gradient.embedded is not None and gradient.embedded.grad is not None
    own = gradient.embedded.grad[0, : len(packed)]
    gradient.remove()
    largest = float(packed.abs().max())
    assert largest > 1e-4
    assert float((packed != 0).float().mean()) > 0.9
    for other in (padded, own):
        assert float((other - packed).abs().max()) < 1e-5 * largest
    broken = plain_gradient(model, packed_inputs(rows[:3]))[0]
    assert float((broken - packed[: len(broken)]).abs().max()) > 1e-5 * largest


def test_without_a_gradient_at_the_input_there_is_no_backward(plain, work) -> None:
    """What the hook is for."""
    model = shapes.twin(plain).requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        model(**padded_inputs(work.sequences[:2]), use_cache=False).loss.backward()


def test_frozen_arms_pass_all_tokens_and_leave_no_gradient(plain, ours, work) -> None:
    """The tokens of the jobs, no steps; no weight gets a gradient."""
    model = shapes.twin(plain)
    expected = Done(work.tokens, len(work.sequences), 0)
    for packed in (False, True):
        arm = PlainFrozen(model, work, 64, packed=packed)
        assert arm().done == expected
        trained = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in arm.batches)
        assert trained == work.tokens - len(work.sequences)
    own = OwnFrozen(ours, work, 64)
    assert own().done == expected
    assert sum(batch.num_tokens for batch in own.batches) == work.tokens
    assert all(parameter.grad is None for parameter in model.parameters())


def test_compiling_is_given_up_in_time_or_for_a_reason(plain) -> None:
    """Both are words for the notes; a model that runs is no reason."""

    def broken() -> None:
        raise RuntimeError("no compiler\nand more")

    def stopped() -> None:
        try:
            time.sleep(LONG_S)
        except TooSlow:
            raise RuntimeError("something else") from None

    model = shapes.twin(plain)
    assert why_not_compiled(model, stopped, 1) == "not compiled within 1 s"
    assert why_not_compiled(model, lambda: time.sleep(LONG_S), 1) == "not compiled within 1 s"
    assert why_not_compiled(model, broken, LONG_S) == "cannot be compiled here: no compiler"
    assert why_not_compiled(model, lambda: None, LONG_S) is None


def test_a_time_limit_is_gone_afterwards() -> None:
    """It strikes while entered only."""
    with pytest.raises(TooSlow), time_limit(1):
        time.sleep(LONG_S)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with time_limit(LONG_S):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
