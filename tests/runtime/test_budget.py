"""The size of a nano-batch where nobody said."""

import pytest
import torch
from support.tiny import tiny_super_model

from tlora.core.errors import SpecError
from tlora.core.job import BaseSpec, DataSpec, EngineSpec, JobSpec, RunSpec
from tlora.runtime.budget import default_budget, tokens_that_fit, tuning


@pytest.mark.parametrize(
    ("device", "parameters", "exact", "tokens"),
    [
        ("cpu", 700_000, False, 2048),
        ("cpu", 700_000, True, 1024),
        ("cpu", 600_000_000, False, 1024),
        ("cuda", 8_000_000_000, False, 8192),
    ],
)
def test_the_default_follows_device_and_model(device, parameters, exact, tokens):
    """Small models on a CPU take more tokens, unless every nano-batch is filled up."""
    assert default_budget(torch.device(device), parameters, exact=exact) == tokens


def run_of(**engine) -> RunSpec:
    job = JobSpec(name="job", data=DataSpec(path="rows"))
    return RunSpec(base=BaseSpec(model="base"), jobs=(job,), engine=EngineSpec(**engine))


@pytest.mark.parametrize(
    ("device", "engine", "tuned"),
    [
        ("cuda", {}, True),
        ("cuda", {"nano_batch_tokens": "tuned"}, True),
        ("cuda", {"nano_batch_tokens": 8192}, False),
        ("cuda", {"isolation": "exact"}, False),
        ("cpu", {}, False),
        ("cpu", {"nano_batch_tokens": "tuned"}, True),
        ("cpu", {"nano_batch_tokens": 512}, False),
    ],
)
def test_the_size_is_tuned_on_a_gpu_and_where_it_is_asked_for(device, engine, tuned):
    """Not where somebody set it, and not where bits count."""
    found = tuning(run_of(**engine), torch.device(device), budget=8192, fits=100_000)
    assert (found is not None) == tuned


@pytest.mark.parametrize("fits", [600, 1500, 3000, 12_000, 1_000_000])
def test_tuning_stays_within_the_memory(fits):
    """However little there is; with next to none the size is left as it is."""
    found = tuning(run_of(), torch.device("cuda"), budget=8192, fits=fits)
    if fits < 1024:
        assert found is None
        return
    assert found is not None and found.limit <= fits
    assert max(found.sizes) <= fits and found.start <= found.idle <= 8192
    assert found.start == (2048 if fits > 2048 else max(found.sizes))


def test_what_fits_follows_the_memory_and_what_is_kept_of_it():
    """Twice the memory holds twice the tokens, and more if activations are recomputed."""
    model = tiny_super_model()
    once, twice = (tokens_that_fit(model, n * 10**8, recompute=False) for n in (1, 2))
    assert twice == pytest.approx(2 * once, rel=0.01) and once > 0
    assert tokens_that_fit(model, 10**8, recompute=True) > 2 * once


def test_tuning_and_exact_isolation_exclude_each_other():
    """Said before anything is loaded, with the field."""
    with pytest.raises(SpecError, match="one size") as error:
        run_of(isolation="exact", nano_batch_tokens="tuned")
    assert error.value.field == "engine.nano_batch_tokens"
