"""Preference pairs to train on, and DPO as a plain loop over a PEFT model has it."""

from dataclasses import dataclass

import numpy as np
import torch

from support.curves import Objective
from support.jobs import VOCABULARY, job
from tlora.core.job import JobSpec
from tlora.core.sequence import IGNORED, TokenPair, TokenSequence

STEPS = 20


def random_pairs(
    seed: int, count: int, vocabulary: int = VOCABULARY, *, longest: int = 16
) -> list[TokenPair]:
    """A prompt of some tokens, and two answers of lengths of their own."""
    generator = np.random.default_rng(seed)

    def side(prompt: np.ndarray, origin: str) -> TokenSequence:
        answer = generator.integers(3, vocabulary, int(generator.integers(1, longest + 1)))
        ids = np.concatenate((prompt, answer)).astype(np.int32)
        labels = ids.copy()
        labels[: len(prompt)] = IGNORED
        return TokenSequence(ids, labels, origin)

    pairs = []
    for index in range(count):
        prompt = generator.integers(3, vocabulary, int(generator.integers(1, longest + 1)))
        origin = f"pairs:{index}"
        pairs.append(TokenPair(side(prompt, origin), side(prompt, origin)))
    return pairs


PAIR_JOBS = [
    job(
        "pairs",
        11,
        {"r": 8},
        {
            "max_steps": STEPS,
            "batch_size": 7,
            "learning_rate": 2e-3,
            "loss": "dpo",
            "beta": 0.3,
            "max_grad_norm": None,
        },
    ),
    job(
        "smoothed",
        12,
        {"r": 3, "lora_dropout": 0.1, "target_modules": ("q_proj", "v_proj", "up_proj")},
        {
            "max_steps": STEPS,
            "batch_size": 3,
            "learning_rate": 5e-3,
            "loss": "dpo",
            "label_smoothing": 0.1,
            "lr_scheduler_type": "linear",
        },
    ),
]
PAIRS = {spec.name: random_pairs(spec.train.seed, 25) for spec in PAIR_JOBS}
"""Fewer than the steps take: a second epoch finds the references of the first."""


@dataclass(frozen=True)
class PlainDpo:
    """The loss of a batch as papers write it; the last three fields break it a little."""

    beta: float
    label_smoothing: float = 0.0
    sign: float = 1.0
    over_tokens: bool = False
    with_reference: bool = True

    @classmethod
    def of(cls, spec: JobSpec, **changes: object) -> "PlainDpo":
        settings = {"beta": spec.train.beta, "label_smoothing": spec.train.label_smoothing}
        return cls(**settings | changes)  # pyright: ignore[reportArgumentType]

    def objective(self) -> Objective:
        def part_loss(peft, sums, part: list[TokenPair], batch: list[TokenPair]) -> torch.Tensor:
            policy = self._log_probabilities(sums, part)
            with torch.no_grad(), peft.disable_adapter():
                reference = self._log_probabilities(sums, part)
            if not self.with_reference:
                reference = torch.zeros_like(reference)
            rewards = self.beta * (policy - reference)
            margin = self.sign * (rewards[:, 0] - rewards[:, 1])
            log_sigmoid = torch.nn.functional.logsigmoid
            right, wrong = log_sigmoid(margin), log_sigmoid(-margin)
            losses = -(1 - self.label_smoothing) * right - self.label_smoothing * wrong
            return losses.sum() / len(batch)

        return part_loss

    def _log_probabilities(self, sums, part: list[TokenPair]) -> torch.Tensor:
        """[pairs, 2]."""
        found = -sums(part).view(-1, 2)
        if self.over_tokens:
            counts = [[side.num_targets for side in pair.sequences] for pair in part]
            found = found / torch.tensor(counts)
        return found
