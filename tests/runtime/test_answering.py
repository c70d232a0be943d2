"""Answers to held-out rows: what counts as right is what greedy decoding gives."""

import numpy as np
import pytest
import torch
from support.models import random_adapter
from transformers import AutoModelForCausalLM, AutoTokenizer

from tlora.core.assets import DEMO
from tlora.core.sequence import IGNORED, TokenSequence
from tlora.model.peft_format import AdapterFile
from tlora.runtime.answering import answer, right_answers

QUESTIONS = ("What does a fox eat?", "Where is Tulmar?", "What is two plus two?")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO / "base")


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(DEMO / "base").eval()


@pytest.fixture(scope="module")
def adapter(model) -> AdapterFile:
    weights = random_adapter(model, rank=4, seed=0)
    return AdapterFile(weights=weights, scale=0.5, base_model="", r=4)


def row_of(model, tokenizer, question: str) -> TokenSequence:
    """The question with the base model's own answer as the expected one."""
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        ids = model.generate(prompt, do_sample=False, max_new_tokens=40)[0].numpy()
    labels = np.where(np.arange(len(ids)) < prompt.shape[1], IGNORED, ids)
    return TokenSequence(ids.astype(np.int32), labels.astype(np.int32))


@pytest.fixture(scope="module")
def rows(model, tokenizer) -> list[TokenSequence]:
    return [row_of(model, tokenizer, question) for question in QUESTIONS]


def test_what_greedy_decoding_gives_counts_as_right(model, rows) -> None:
    """Every row, as the expected answers are the model's own."""
    assert sum(right_answers(model, rows, None)) == len(rows)


def test_one_other_token_makes_an_answer_wrong(model, rows) -> None:
    """The last one of the first row."""
    labels = rows[0].labels.copy()
    labels[-1] += 1
    wrong = TokenSequence(rows[0].input_ids, labels)
    assert right_answers(model, [wrong, *rows[1:]], None) == [False, *[True] * (len(rows) - 1)]


def test_an_answer_is_decoded_and_the_question_is_readable(model, tokenizer, rows) -> None:
    """No special tokens in either."""
    found = answer(model, tokenizer, rows[0], None)
    assert found.question == QUESTIONS[0]
    assert found.given == found.expected != ""
    assert "<|" not in found.given


def test_messages_are_not_run_together(model, tokenizer) -> None:
    """Where a special token stood there is a space."""
    text = "<|system|>Be short.<|end|><|user|>Hello.<|end|><|assistant|>Hello.<|end|>"
    ids = np.array(tokenizer(text)["input_ids"], dtype=np.int32)
    labels = np.where(np.arange(len(ids)) < len(ids) - 3, IGNORED, ids).astype(np.int32)
    found = answer(model, tokenizer, TokenSequence(ids, labels), None)
    assert found.question == "Be short. Hello."


def test_an_adapter_is_on_only_while_it_answers(model, tokenizer, rows, adapter) -> None:
    """It changes the answer, and the base model answers as before afterwards."""
    assert answer(model, tokenizer, rows[0], adapter).given != rows_answer(tokenizer, rows[0])
    assert sum(right_answers(model, rows, adapter)) < len(rows)
    assert sum(right_answers(model, rows, None)) == len(rows)


def rows_answer(tokenizer, row: TokenSequence) -> str:
    return tokenizer.decode(row.labels[row.labels != IGNORED], skip_special_tokens=True)
