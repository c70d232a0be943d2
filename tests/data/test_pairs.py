"""Preference pairs from rows to datasets: one unit, both sides cut alike, and wrong input."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlora.core.errors import DataError, SpecError
from tlora.core.job import DataSpec, EvalSpec, JobSpec, TrainSpec
from tlora.core.sequence import IGNORED, TokenPair, TokenSequence
from tlora.data import prepare as prepare_module
from tlora.data.pairs import PairDataset, fit_pair
from tlora.data.prepare import PreparedData, prepare
from tlora.data.preview import preview_rows
from tlora.data.rows import Origin
from tlora.data.shape_readers import read_preference_row

ROWS = [
    {"prompt": f"How many? {n}", "chosen": "word " * (n + 1), "rejected": "word " * (10 - n)}
    for n in range(10)
]
DPO = TrainSpec(loss="dpo")
QUESTION = {"role": "user", "content": "How are you?"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture
def job(write_lines) -> JobSpec:
    path = write_lines(ROWS)
    data = DataSpec(path=str(path))
    return JobSpec(name="taste", data=data, eval=EvalSpec(split=0.2), train=DPO)


@pytest.fixture
def run(tokenizer, tmp_path):
    def run_prepare(job: JobSpec) -> PreparedData:
        return prepare(job, tokenizer, cache_dir=tmp_path / "cache")

    return run_prepare


def all_pairs(rows) -> list[TokenPair]:
    assert isinstance(rows, PairDataset)
    return [rows[i] for i in range(len(rows))]


def test_a_row_is_one_pair_with_both_its_answers(job, run, tokenizer, assert_trained):
    """Held-out pairs are whole pairs too, and rows, not sides, are counted."""
    prepared = run(job)
    held_out = all_pairs(prepared.evaluation)
    found = all_pairs(prepared.train) + held_out
    assert (len(found), len(held_out)) == (10, 2)
    for pair in found:
        row = ROWS[int(pair.origin.rpartition(":")[2]) - 1]
        for side, key in zip(pair.sequences, ("chosen", "rejected"), strict=True):
            assert side.origin == pair.origin
            assert_trained(side.input_ids, side.labels, [row[key] + "<|end|>"], tokenizer)
    assert prepared.train.lengths.tolist() == [len(pair) for pair in all_pairs(prepared.train)]
    targets = [pair.num_targets for pair in all_pairs(prepared.train)]
    assert prepared.train.num_targets().tolist() == targets
    text = "\n".join(prepared.report.lines())
    assert "10 pairs of preference (keys prompt, chosen, rejected)" in text
    assert "training: 8 pairs" in text and "held out: 2 pairs" in text


def test_pairs_are_tokenised_once(job, run, monkeypatch):
    assert not run(job).report.from_cache
    monkeypatch.setattr(prepare_module, "read_rows", lambda sources: pytest.fail("read again"))
    other = replace(job, train=replace(DPO, max_length=20, seed=3, beta=0.5))
    assert run(other).report.from_cache


def test_both_answers_are_shown_in_a_preview(job, tokenizer):
    shown = list(preview_rows(job.data, tokenizer, limit=1))
    assert [row.side for row in shown] == ["chosen", "rejected"]
    trained = ["".join(piece.text for piece in row.pieces if piece.trained) for row in shown]
    assert trained == [ROWS[0]["chosen"] + "<|end|>", ROWS[0]["rejected"] + "<|end|>"]


def side(prompt: int, length: int) -> TokenSequence:
    """Tokens that say where they stand: answers of one prompt begin alike."""
    ids = np.arange(prompt + length, dtype=np.int32)
    labels = ids.copy()
    labels[:prompt] = IGNORED
    return TokenSequence(ids, labels)


@settings(deadline=None, derandomize=True)
@given(
    prompt=st.integers(0, 40),
    lengths=st.tuples(st.integers(2, 40), st.integers(2, 40)),
    max_length=st.integers(2, 50),
)
def test_both_sides_of_a_cut_pair_begin_at_the_same_token(prompt, lengths, max_length):
    """And each is within max_length and has something to be judged by; what fits stays whole."""
    pair = TokenPair(*(side(prompt, length) for length in lengths))
    cut = fit_pair(pair, max_length)
    assert len({int(each.input_ids[0]) for each in cut.sequences}) == 1
    for each, whole in zip(cut.sequences, pair.sequences, strict=True):
        assert len(each) <= max_length
        assert each.num_targets >= 1
        if prompt and prompt + max(lengths) <= max_length:
            assert len(each) == len(whole)
        elif prompt and max(lengths) < max_length:
            assert each.num_targets == whole.num_targets, "prompts are cut before answers"


def test_a_pair_is_too_long_if_one_side_is(job, run):
    """The first row and the last have the longest answers, one chosen, the other rejected."""
    whole = run(replace(job, eval=EvalSpec()))
    longest = int(whole.train.sequence_lengths.max())
    train = replace(DPO, max_length=longest - 1)
    cut = run(replace(job, eval=EvalSpec(), train=train))
    assert cut.train.num_truncated == 2
    assert int(cut.train.sequence_lengths.max()) == longest - 1
    assert cut.train.lengths.tolist() == [len(pair) for pair in all_pairs(cut.train)]
    targets = [pair.num_targets for pair in all_pairs(cut.train)]
    assert cut.train.num_targets().tolist() == targets
    dropped = run(replace(job, eval=EvalSpec(), train=replace(train, over_length="drop")))
    assert (len(dropped.train), dropped.train.num_dropped) == (8, 2)
    with pytest.raises(DataError, match=rf"job 'taste': .*rows.jsonl:\d+: the row has {longest}"):
        run(replace(job, train=replace(train, over_length="raise")))


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": [QUESTION, answer("a"), QUESTION], "chosen": "b", "rejected": [answer("c")]},
        {
            "chosen": [QUESTION, answer("a"), QUESTION, answer("b")],
            "rejected": [QUESTION, answer("a"), QUESTION, answer("c")],
        },
        {
            "prompt": "How are you?",
            "chosen": [QUESTION, answer("a"), QUESTION, answer("b")],
            "rejected": [QUESTION, answer("a"), QUESTION, answer("c")],
        },
    ],
    ids=["prompt as messages", "whole chats", "whole chats beside their prompt"],
)
def test_what_both_chats_begin_with_is_their_prompt(values):
    """An earlier answer that both share tells nothing and is not trained on."""
    pair = read_preference_row(values, Origin("rows.jsonl", 7))
    for found, text in ((pair.chosen, "b"), (pair.rejected, "c")):
        assert found.messages == (QUESTION, answer("a"), QUESTION, answer(text))
        assert found.trained == (False, False, False, True)


def test_pairs_and_losses_must_agree(job, run, write_lines):
    """Both ways round the job and the field are named."""
    with pytest.raises(SpecError, match=r"train.loss: token_mean cannot train on preference"):
        run(replace(job, train=TrainSpec()))
    path = write_lines([{"prompt": "a", "completion": "b"}])
    with pytest.raises(SpecError, match=r"job 'taste': train.loss: dpo trains on preference pairs"):
        run(replace(job, data=DataSpec(path=str(path)), eval=EvalSpec()))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"data": {"train_on": "all"}}, "data.train_on: must be completion where train.loss is"),
        ({"data": {"shape": "chat"}}, "data.shape: must be preference or auto"),
        ({"train": {"beta": 0.0}}, "train.beta: must be positive, got 0.0"),
        ({"train": {"label_smoothing": 0.5}}, r"label_smoothing: must be in \[0, 0.5\), got 0.5"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings, complaint):
    with pytest.raises(SpecError, match=complaint):
        JobSpec(
            name="taste",
            data=DataSpec(path="rows.jsonl", **settings.get("data", {})),
            train=TrainSpec(loss="dpo", **settings.get("train", {})),
        )
