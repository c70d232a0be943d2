"""Jobs of a file as the scheduler sees them."""

from pathlib import Path

import numpy as np
import pytest
from support.runs import job_file

from tlora.config import load_spec
from tlora.model.loading import load_shape
from tlora.model.targets import find_targets
from tlora.runtime.checking import prepare_jobs
from tlora.runtime.requests import SAMPLE, requests_of, sampled


def test_a_request_says_what_the_job_file_and_the_data_say(base: Path, rows: Path) -> None:
    """Steps of whole epochs, the batch no larger than the data, coverage by widths."""
    spec = load_spec(
        job_file(
            base,
            {
                "name": "a",
                "data": {"path": str(rows)},
                "lora": {"r": 3},
                "train": {"max_steps": None, "num_train_epochs": 2, "batch_size": 6, "weight": 2.0},
            },
            {
                "name": "b",
                "data": {"path": str(rows)},
                "lora": {"target_modules": ["q_proj", "v_proj"]},
                "train": {"batch_size": 64, "max_steps": 5},
            },
        )
    )
    data = prepare_jobs(spec, limit=None)
    a, b = requests_of(spec, data, find_targets(load_shape(spec.base)), base="tiny")
    # 20 rows in batches of 6: four steps an epoch.
    assert (a.total_steps, a.load.rank, a.load.batch_size, a.priority) == (8, 3, 6, 2.0)
    assert (b.total_steps, b.load.batch_size) == (5, 20)
    assert a.load.lengths == tuple(sorted(int(length) for length in data["a"].train.lengths))
    assert a.base == "tiny"
    assert a.load.coverage == 1.0
    # q: 32 -> 32, v: 32 -> 16, of q, k, v, o, gate, up, down.
    assert b.load.coverage == pytest.approx((64 + 48) / (64 + 48 + 48 + 64 + 3 * 80))


def test_a_sample_keeps_the_mean_and_the_longest() -> None:
    """Of skewed lengths, within two per cent; the first ones alone would not do."""
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(4.0, 0.8, 5000).astype(int) + 2
    found = sampled(lengths, SAMPLE)
    assert len(found) == SAMPLE
    assert max(found) == lengths.max()
    mean = lengths.mean()
    assert abs(np.mean(found[:-1]) / np.sort(lengths)[: -5000 // SAMPLE].mean() - 1) < 0.02
    assert abs(np.mean(np.sort(lengths)[:SAMPLE]) / mean - 1) > 0.02
