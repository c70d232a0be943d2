"""The whole way on real datasets with a real tokenizer: nothing refused, masks exact."""

import gzip
import json

import pytest
from transformers import AutoTokenizer

from tlora.core.job import DataSpec, JobSpec, TrainSpec
from tlora.core.sequence import IGNORED
from tlora.data.prepare import prepare

pytestmark = pytest.mark.real_data

SETS = [
    "commonsense_mc",
    "gpteacher_roleplay",
    "gsm8k",
    "humaneval",
    "medquad",
    "nl2bash",
    "pubmedqa",
    "qmsum",
    "spider_dev",
    "squality",
    "t0_wiki_hop",
    "tatqa",
]
CHATS = ["gsm8k", "nl2bash", "tatqa"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:\n{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)


@pytest.fixture(scope="module")
def stories_tokenizer(real_data):
    return AutoTokenizer.from_pretrained(real_data / "models" / "stories260K")


@pytest.mark.parametrize(
    ("name", "template"), [*((name, None) for name in SETS), *((name, TEMPLATE) for name in CHATS)]
)
def test_exactly_the_responses_of_real_rows_are_trained(
    name, template, real_data, stories_tokenizer, tmp_path
):
    """Every row of every set, its end token with it."""
    path = real_data / "datasets" / f"{name}.jsonl.gz"
    job = JobSpec(
        name="real",
        data=DataSpec(path=str(path), chat_template=template),
        train=TrainSpec(max_length=10**6),
    )
    prepared = prepare(job, stories_tokenizer, cache_dir=tmp_path)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    assert len(prepared.train) == len(rows)
    assert prepared.report.rows_dropped == prepared.report.rows_truncated == 0
    for i, row in enumerate(rows):
        sequence = prepared.train[i]
        assert sequence.origin == f"{path}:{i + 1}"
        trained = sequence.labels != IGNORED
        answer = stories_tokenizer.decode(sequence.input_ids[trained])
        question = stories_tokenizer.decode(sequence.input_ids[~trained])
        # A space at the end of the prompt goes with the answer's first word.
        assert answer.strip() == (row["response"] + "</s>").strip()
        assert row["prompt"].strip() in question
