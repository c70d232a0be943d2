"""From a job to its datasets: the whole way, its report, and its errors."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tlora.core.errors import DataError
from tlora.core.job import DataSpec, EvalSpec, JobSpec, TrainSpec
from tlora.core.sequence import IGNORED
from tlora.data import prepare as prepare_module
from tlora.data.prepare import PreparedData, prepare

ROWS = [{"prompt": f"How many? {n}", "completion": "word " * (n + 1)} for n in range(10)]


@pytest.fixture
def job(write_lines) -> JobSpec:
    path = write_lines(ROWS)
    return JobSpec(name="sums", data=DataSpec(path=str(path)), eval=EvalSpec(split=0.2))


@pytest.fixture
def run(tokenizer, tmp_path):
    def run_prepare(job: JobSpec, **options) -> PreparedData:
        return prepare(job, tokenizer, cache_dir=tmp_path / "cache", **options)

    return run_prepare


def origins(dataset) -> list[str]:
    return [dataset[i].origin for i in range(len(dataset))]


def test_a_job_gets_its_rows_its_held_out_rows_and_a_report(job, run, tokenizer, assert_trained):
    prepared = run(job)
    assert prepared.evaluation is not None
    everything = origins(prepared.train) + origins(prepared.evaluation)
    assert sorted(everything) == sorted(f"{job.data.path}:{line}" for line in range(1, 11))
    for dataset in (prepared.train, prepared.evaluation):
        for i in range(len(dataset)):
            row = dataset[i]
            number = int(row.origin.rpartition(":")[2]) - 1
            expected = [ROWS[number]["completion"] + "<|end|>"]
            assert_trained(row.input_ids, row.labels, expected, tokenizer)

    report = prepared.report
    assert report.detected == "prompt_completion (keys prompt, completion)"
    assert (report.rows_read, report.train_rows, report.eval_rows) == (10, 8, 2)
    assert report.train_tokens == int(prepared.train.lengths.sum())
    assert report.train_targets == sum(prepared.train[i].num_targets for i in range(8))
    text = "\n".join(report.lines())
    assert "10 rows of prompt_completion" in text
    assert "held out: 2 rows" in text


def test_jobs_that_differ_in_length_seed_and_split_share_one_tokenisation(job, run, monkeypatch):
    assert not run(job).report.from_cache
    monkeypatch.setattr(prepare_module, "read_rows", lambda sources: pytest.fail("read again"))
    other = replace(
        job,
        name="other",
        train=TrainSpec(max_length=6, seed=3, batch_size=2),
        eval=EvalSpec(split=3),
    )
    prepared = run(other)
    assert prepared.report.from_cache
    assert prepared.report.rows_truncated > 0
    assert any("cut to 6 tokens" in line for line in prepared.report.lines())


def test_held_out_rows_do_not_depend_on_batch_size_or_length(job, run):
    first = run(job).evaluation
    second = run(replace(job, train=TrainSpec(batch_size=1, max_length=30))).evaluation
    assert first is not None
    assert second is not None
    assert origins(first) == origins(second)


def test_rows_may_be_held_out_in_files_of_their_own(job, run, write_lines):
    path = write_lines(ROWS[:3], name="eval.jsonl")
    prepared = run(replace(job, data=replace(job.data, eval_path=str(path))))
    assert prepared.evaluation is not None
    assert len(prepared.train) == 10
    assert origins(prepared.evaluation) == [f"{path}:{line}" for line in (1, 2, 3)]


def test_held_out_files_without_rows_are_named_with_their_field(job, run, tmp_path):
    path = tmp_path / "none.jsonl"
    path.touch()
    empty = replace(job, data=replace(job.data, eval_path=str(path)))
    with pytest.raises(DataError, match=r"none.jsonl: .*holds no rows.* in data.eval_path$"):
        run(empty)


def test_a_limit_on_evaluation_does_not_give_rows_back_to_training(job, run):
    prepared = run(replace(job, eval=EvalSpec(split=4, batch_limit=2)))
    assert prepared.evaluation is not None
    assert (len(prepared.train), len(prepared.evaluation)) == (6, 2)


def test_a_limit_on_evaluation_counts_rows_that_are_short_enough(job, run):
    """Of those left out for their length none takes the place of another."""
    most = int(np.median(run(replace(job, eval=EvalSpec())).train.lengths))
    train = TrainSpec(max_length=most, over_length="drop")
    whole = run(replace(job, train=train, eval=EvalSpec(split=7)))
    assert len(whole.evaluation) > 2 and whole.evaluation.num_dropped
    limited = run(replace(job, train=train, eval=EvalSpec(split=7, batch_limit=2)))
    assert len(limited.evaluation) == 2
    assert set(origins(limited.evaluation)) < set(origins(whole.evaluation))
    assert limited.report.rows_dropped == whole.report.rows_dropped
    assert origins(limited.train) == origins(whole.train)


def test_without_a_split_there_is_no_evaluation(job, run):
    assert run(replace(job, eval=EvalSpec())).evaluation is None


def test_progress_tells_the_rows_done(job, run, monkeypatch):
    monkeypatch.setattr(prepare_module, "BATCH_ROWS", 4)
    told: list[int] = []
    run(job, progress=told.append)
    assert told == [4, 8, 10]


def test_a_template_may_be_given_as_text_or_file(job, run, templates, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text(templates.turns)
    as_text = run(replace(job, data=replace(job.data, chat_template=templates.turns)))
    as_file = run(replace(job, data=replace(job.data, chat_template=str(file))))
    assert as_text.report.rendering == "chat template"
    assert as_file.report.from_cache


def with_content(job: JobSpec, content: bytes, **settings) -> JobSpec:
    Path(job.data.paths[0]).write_bytes(content)
    return replace(job, data=replace(job.data, **settings))


def as_lines(*rows: dict[str, object]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


PAIR: dict[str, object] = {"prompt": "a", "completion": "b"}
BAD_INPUT = {
    "empty file": (b"", {}, "holds no rows"),
    "blank lines": (b"\n \n", {}, "holds no rows"),
    "malformed row": (as_lines(PAIR) + b"{oops}\n", {}, ":2: not valid JSON"),
    "not UTF-8": (b'{"text": "\xff"}\n', {}, ":1: not UTF-8"),
    "unknown shape": (as_lines({"question": "a"}), {}, ":1: cannot tell"),
    "another shape": (as_lines(PAIR, {"text": "a"}), {}, ":2: expected a row of shape"),
    "wrong columns": (
        as_lines(PAIR),
        {"columns": {"prompt": "ask"}},
        ":1: data.columns maps prompt",
    ),
    "missing file": (b"", {"path": "missing.jsonl"}, "missing.jsonl: no such file"),
    "missing template": (as_lines(PAIR), {"chat_template": "missing.jinja"}, "data.chat_template"),
    "no better answer": (
        as_lines({"prompt": "a", "rejected": "c"}),
        {"shape": "preference"},
        ":1: expected a row of shape preference with the keys chosen, rejected",
    ),
    "texts without a prompt": (
        as_lines({"chosen": "Q: a A: b", "rejected": "Q: a A: c"}),
        {},
        ":1: chosen is a text, so the row needs a prompt",
    ),
    "an answer that is no text": (
        as_lines({"prompt": "a", "chosen": 3, "rejected": "c"}),
        {},
        ":1: chosen must be a text or a list of messages, got 3",
    ),
    "tokens of another model": (
        as_lines({"input_ids": [1, 99999]}),
        {},
        ":1: input_ids holds 99999",
    ),
    "only the first token": (
        as_lines({"input_ids": [1, 2], "labels": [1, -100]}),
        {},
        ":1: the row has no",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_names_the_job_the_place_and_the_reason(name, job, run, tmp_path):
    content, settings, complaint = BAD_INPUT[name]
    with pytest.raises(DataError) as caught:
        run(with_content(job, content, **settings))
    assert str(caught.value).startswith("job 'sums': ")
    assert complaint in str(caught.value)
    assert caught.value.job == "sums"
    tokens = tmp_path / "cache" / "tokens"
    assert not tokens.exists() or list(tokens.iterdir()) == [], "a failed job leaves no cache"


def test_over_length_rows_can_stop_or_empty_a_job(job, run):
    with pytest.raises(DataError, match=r"job 'sums': .*rows.jsonl:\d+: the row has \d+ tokens"):
        run(replace(job, train=TrainSpec(max_length=5, over_length="raise")))
    with pytest.raises(DataError, match=r"job 'sums': no row is left to train on"):
        run(replace(job, train=TrainSpec(max_length=5, over_length="drop")))


def with_empty(count: int, *places: int) -> list[object]:
    """Rows of which those at these places, from 1, have no answer."""
    return [
        {"prompt": f"How many? {n}", "completion": "" if n in places else "word"}
        for n in range(1, count + 1)
    ]


def test_rows_with_an_empty_answer_are_counted_and_named(job, run, write_lines, tokenizer):
    """They train on their end token as before; held-out ones count, in the order of the file."""
    path = write_lines(with_empty(12, 2, 3, 7, 11, 12))
    for split in (0, 6):
        prepared = run(replace(job, eval=EvalSpec(split=split)))
        report = prepared.report
        assert (report.rows_empty, report.rows_read) == (5, 12)
        assert report.empty_at == tuple(f"{path}:{line}" for line in (2, 3, 7))
        (line,) = [line for line in report.lines() if "empty" in line]
        assert line == (
            "empty answers, of which only the end is trained: 5 rows "
            f"({path}:2, {path}:3, {path}:7 and 2 more)"
        )
    second = run(replace(job, eval=EvalSpec(split=0))).train[1]
    assert tokenizer.decode(second.input_ids[second.labels != IGNORED]) == "<|end|>"


def test_rows_with_an_empty_answer_that_are_not_there_do_not_count(job, run, write_lines):
    """Left out for their length, beyond eval.batch_limit, or trained on as a whole."""
    rows = with_empty(6, 2, 5)
    rows[1] = {"prompt": "How many? " * 50, "completion": ""}
    path = write_lines(rows)
    bare = replace(job, eval=EvalSpec(split=0))
    short = run(replace(bare, train=TrainSpec(max_length=64, over_length="drop"))).report
    assert (short.rows_dropped, short.rows_empty, short.empty_at) == (1, 1, (f"{path}:5",))
    everything = replace(bare.data, train_on="all")
    assert run(replace(bare, data=everything)).report.rows_empty == 0
    other = write_lines(with_empty(4, 1, 2, 3, 4), "other.jsonl")
    split = replace(bare, data=replace(bare.data, eval_path=str(other)))
    assert run(split).report.rows_empty == 6
    assert run(replace(split, eval=EvalSpec(batch_limit=1))).report.rows_empty == 3


def test_a_pair_counts_once_whichever_side_is_empty(run, write_lines):
    """And is named by its own line."""
    path = write_lines(
        [
            {"prompt": "Hi", "chosen": "Hello.", "rejected": "What?"},
            {"prompt": "Hi", "chosen": "Hello.", "rejected": ""},
            {"prompt": "Hi", "chosen": "", "rejected": " "},
        ]
    )
    job = JobSpec(name="dpo", data=DataSpec(path=str(path)), train=TrainSpec(loss="dpo"))
    report = run(job).report
    assert (report.rows_empty, report.empty_at) == (2, (f"{path}:2", f"{path}:3"))
    assert "2 pairs" in report.lines()[-1]
