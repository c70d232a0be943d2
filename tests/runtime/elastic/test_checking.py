"""What a run does for jobs that ask to join it, while others are at work."""

from pathlib import Path

import pytest
import torch
from support.runs import job_file, write_rows

from tlora.config import load_spec
from tlora.model.loading import load_shape
from tlora.runtime import checking
from tlora.runtime.elastic.checking import newcomers_data


def test_a_tokenizer_is_loaded_for_the_first_newcomer_alone(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others find it; but data that have changed in between are read again."""
    loaded, load = [], checking.load_tokenizer
    monkeypatch.setattr(checking, "load_tokenizer", lambda base: loaded.append(base) or load(base))
    rows = write_rows(tmp_path / "rows.jsonl", 4)
    spec = load_spec(job_file(base, {"name": "a", "data": {"path": str(rows)}}))
    prepare = newcomers_data(spec, load_shape(spec.base), torch.device("cpu"))
    assert not loaded, "nobody has asked"
    first = prepare(spec.jobs)["a"]
    write_rows(rows, 7)
    second = prepare(spec.jobs)["a"]
    assert (len(first.train), len(second.train)) == (4, 7) and first.key != second.key
    assert len(loaded) == 1
