"""What a model answers to held-out rows, with and without an adapter.

Greedy decoding, on the plain model with the adapter put on by hooks: what a server would give.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tlora.core.sequence import IGNORED, TokenSequence
from tlora.model.peft_format import AdapterFile
from tlora.model.plain import plain_adapter

MAX_NEW_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Answer:
    question: str
    expected: str
    given: str


@torch.no_grad()
def right_answers(
    model: PreTrainedModel, rows: Sequence[TokenSequence], adapter: AdapterFile | None
) -> list[bool]:
    """Which rows greedy decoding would answer word for word, given the earlier answers of the row:
    those where every trained token is the likeliest."""
    right: list[bool] = []
    with _adapted(model, adapter):
        for row in rows:
            labels = torch.from_numpy(row.labels.astype(np.int64))[1:].to(model.device)
            likeliest = model(input_ids=_ids(row.input_ids, model)).logits[0, :-1].argmax(-1)
            right.append(bool(((likeliest == labels) | (labels == IGNORED)).all()))
    return right


@torch.no_grad()
def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    row: TokenSequence,
    adapter: AdapterFile | None,
) -> Answer:
    """To the first question of the row."""
    trained = row.labels != IGNORED
    start = int(np.argmax(trained))
    length = int(np.argmin(np.append(trained[start:], False)))
    prompt = row.input_ids[:start]
    with _adapted(model, adapter):
        ids = _ids(prompt, model)
        output = model.generate(  # pyright: ignore[reportCallIssue]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
        )
    return Answer(
        question=_text(tokenizer, prompt),
        expected=_text(tokenizer, row.input_ids[start : start + length]),
        given=_text(tokenizer, output[0, start:].cpu().numpy()),
    )


def _adapted(model: PreTrainedModel, adapter: AdapterFile | None):
    return plain_adapter(model, adapter.weights, adapter.scale) if adapter else nullcontext()


def _ids(tokens: np.ndarray, model: PreTrainedModel) -> torch.Tensor:
    return torch.from_numpy(tokens.astype(np.int64))[None].to(model.device)


def _text(tokenizer: PreTrainedTokenizerBase, tokens: np.ndarray) -> str:
    """Without special tokens, but not run together where one stood between two messages."""
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    pieces: list[list[int]] = [[]]
    for token in tokens.tolist():
        if token in special:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return " ".join(str(tokenizer.decode(piece)) for piece in pieces if piece).strip()
