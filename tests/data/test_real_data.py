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
CHECKED_ROWS = 40


@pytest.fixture(scope="module")
def stories_tokenizer(real_data):
    return AutoTokenizer.from_pretrained(real_data / "models" / "stories260K")


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
@pytest.mark.parametrize("name", SETS)
def test_exactly_the_responses_of_real_rows_are_trained(
    name, chat, real_data, stories_tokenizer, templates, tmp_path
):
    """The end token is trained with them; in a chat, text around special tokens is tokenised anew."""
    path = real_data / "datasets" / f"{name}.jsonl.gz"
    template = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:\n{% endif %}"
    job = JobSpec(
        name="real",
        data=DataSpec(path=str(path), chat_template=template if chat else None),
        train=TrainSpec(max_length=10**6),
    )
    prepared = prepare(job, stories_tokenizer, cache_dir=tmp_path)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    assert len(prepared.train) == len(rows)
    assert prepared.report.rows_dropped == prepared.report.rows_truncated == 0
    step = max(1, len(rows) // CHECKED_ROWS)
    for i in range(0, len(rows), step):
        sequence = prepared.train[i]
        assert sequence.origin == f"{path}:{i + 1}"
        trained = sequence.labels != IGNORED
        answer = stories_tokenizer.decode(sequence.input_ids[trained])
        question = stories_tokenizer.decode(sequence.input_ids[~trained])
        # Decoding drops the space that this tokenizer puts before the first word.
        assert answer.strip() == (rows[i]["response"] + "</s>").strip()
        assert rows[i]["prompt"].strip() in question
