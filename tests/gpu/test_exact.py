"""Exact isolation on a CUDA device: attention, the proof and whole runs."""

import importlib
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gpu_exact")


@pytest.fixture
def figures(script):
    return script.Figures("test", 600, torch.device("cuda"))


def test_attention_gradients_have_the_same_bits_in_any_company(script, figures):
    """Twice and among other sequences; near the float32 truth."""
    script.check_attention(figures)
    found = figures.values["attention"]
    assert found["same_bits"] == found["scenes"] and found["right"]


@pytest.mark.parametrize("shape", ["tiny", "llama-1b"])
def test_jobs_have_the_same_bits_in_three_companies_and_twice(script, figures, shape):
    """In bfloat16, two layers; by default they have not."""
    cuda = torch.device("cuda")
    for exact in (True, False):
        base = script.random_model(shape, cuda, layers=2)
        model = script.SuperModel(base, per_sequence=exact, reserve_rows=512)
        if exact:
            script.prove_exact(model, 2048, ranks={8, 16}, lengths=script.LENGTHS)
        script.check_bits(model, 2048, 3, figures, exact=exact)
    assert figures.values["bits_exact"]["all_same"]
    assert not figures.values["bits_default"]["all_same"]
