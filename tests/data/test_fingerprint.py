"""What the cache key depends on, and what it does not."""

import os
import shutil
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerFast

from tlora.core.job import DataSpec
from tlora.data import fingerprint
from tlora.data.fingerprint import cache_key, file_digest, tokenizer_fingerprint
from tlora.data.sources import find_sources


@pytest.fixture
def path(write_lines):
    return write_lines([{"text": "a"}])


def key(path, tokenizer, tmp_path, template=None, **settings):
    data = replace(DataSpec(path=str(path)), **settings)
    memo_dir = tmp_path / "digests"
    return cache_key(find_sources(data.paths), data, template, tokenizer, memo_dir=memo_dir)


def test_a_copy_under_another_name_has_the_same_key(path, tokenizer, tmp_path):
    copy = shutil.copy(path, tmp_path / "copy.jsonl")
    assert key(copy, tokenizer, tmp_path) == key(path, tokenizer, tmp_path)


def test_everything_that_changes_tokens_changes_the_key(
    path, tokenizer, beginning_tokenizer, tmp_path
):
    as_csv = shutil.copy(path, tmp_path / "rows.csv")
    keys = [
        key(path, tokenizer, tmp_path),
        key(path, beginning_tokenizer, tmp_path),
        key(as_csv, tokenizer, tmp_path),
        key(path, tokenizer, tmp_path, template="{{ messages }}"),
        key(path, tokenizer, tmp_path, columns={"prompt": "a"}),
        key(path, tokenizer, tmp_path, shape="text"),
        key(path, tokenizer, tmp_path, train_on="all"),
    ]
    path.write_text('{"text": "b"}\n')
    # A quick machine may be here within one tick of the clock that files are dated by.
    os.utime(path, ns=(1, 1))
    keys.append(key(path, tokenizer, tmp_path))
    assert len(set(keys)) == len(keys)


def test_a_digest_is_remembered_until_the_file_changes(path, tmp_path, monkeypatch):
    (source,) = find_sources((str(path),))
    digest = file_digest(source, memo_dir=tmp_path / "digests")
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "_sha256", lambda source: pytest.fail("hashed again"))
        assert file_digest(source, memo_dir=tmp_path / "digests") == digest
    for memo in (tmp_path / "digests").iterdir():
        memo.write_text("damaged")
    assert file_digest(source, memo_dir=tmp_path / "digests") == digest
    path.write_text('{"text": "c"}\n')
    os.utime(path, ns=(1, 1))
    assert file_digest(source, memo_dir=tmp_path / "digests") != digest


def test_what_a_call_leaves_in_the_tokenizer_does_not_count(tokenizer):
    before = tokenizer_fingerprint(tokenizer)
    tokenizer("Hello, how are you?", truncation=True, max_length=2)
    assert tokenizer_fingerprint(tokenizer) == before
    other = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|turn|>"
    )
    assert tokenizer_fingerprint(other) != before
