"""A base in fewer bits on a CUDA device: the kernels at the sizes of an 8B model, and training."""

import importlib
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tlora.core.job import DataSpec, JobSpec, LoraSpec, TrainSpec
from tlora.core.sequence import TokenSequence
from tlora.kernels.quantised import devices, fp8, nf4, proving, quantise, triton_nf4
from tlora.model.launches import Launches
from tlora.model.quantising import quantise_linears
from tlora.model.super_model import SuperModel
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
CUDA = torch.device("cuda")
VOCABULARY = 512


@pytest.fixture
def always_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a shape's third run on, however fast the host is."""
    monkeypatch.setattr(Launches, "bound", property(lambda self: self.runs >= 2))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=CUDA).bfloat16()


@pytest.mark.parametrize("how", ["nf4", "fp8"])
def test_this_device_is_right(how: str, caplog) -> None:
    """Nothing of what it can do is refused."""
    proving.prove.cache_clear()
    with caplog.at_level(logging.WARNING):
        proving.prove(CUDA, how)
    assert not caplog.records, caplog.text
    assert devices.device_serves(CUDA)
    if torch.cuda.get_device_capability() >= devices.PRODUCTS_FROM:
        assert devices.has_products(CUDA)


@pytest.mark.parametrize("shape", [(14336, 4096), (1024, 4096), (4096, 14336), (128256, 4096)])
def test_large_weights_are_unpacked_to_the_same_bits(shape: tuple[int, int]) -> None:
    """The last has 525 million values."""
    packed, scales = nf4.quantise(normal(*shape))
    found = triton_nf4.dense(packed, scales, shape, torch.bfloat16)
    values = found.view(-1, nf4.BLOCK)
    pairs = nf4._pairs(CUDA)
    for first in range(0, len(scales), 1 << 20):
        some = packed.view(-1, nf4.BLOCK // 2)[first : first + (1 << 20)]
        wanted = (pairs[some.int()].view(-1, nf4.BLOCK) * scales[first:][: len(some), None]).to(
            torch.bfloat16
        )
        assert torch.equal(values[first : first + (1 << 20)], wanted)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < devices.ROUNDS_FROM,
    reason="the kernel rounds from Hopper on",
)
@pytest.mark.parametrize("widths", [(4096,), (4096, 1024, 1024), (14336, 14336)])
def test_large_rows_are_quantised_to_the_same_bits(widths: tuple[int, ...]) -> None:
    from tlora.kernels.quantised import triton_fp8

    parts = [normal(1111, width, seed=i) for i, width in enumerate(widths)]
    factors = normal(sum(widths), seed=9).float().abs()
    for given in (None, factors):
        found = triton_fp8.quantise_rows(parts, given)
        wanted = fp8.quantise_rows_plainly(parts, given)
        assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))
        assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("tokens", [1, 7, 130, 2048, 8192])
def test_rows_of_products_in_fp8_keep_their_bits(tokens: int) -> None:
    """Whatever the rows behind them are, and whatever the number of tokens the right values."""
    if not devices.has_products(CUDA):
        pytest.skip("this device does not multiply in FP8")
    weights = [normal(out, 4096, seed=out) * 4096**-0.5 for out in (4096, 1024)]
    kept = [quantise(weight, "fp8") for weight in weights]
    values, scales = [each.values for each in kept], [each.scales for each in kept]
    x = normal(tokens, 4096, seed=3)
    y = fp8.linears(x, values, scales, [None, None])
    for found, weight in zip(y, weights, strict=True):
        wanted = x.double() @ weight.double().T
        assert 1e-3 < (found.double() - wanted).norm() / wanted.norm() < 6e-2
    half = (tokens + 1) // 2
    loud = x.clone()
    loud[half:] *= 1e3
    assert torch.equal(fp8.linears(loud, values, scales, [None, None])[0][:half], y[0][:half])


def super_model(how: str, device: torch.device, *, compiled: bool) -> SuperModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    # On the CPU, so that both have the same values: how they are rounded is tested elsewhere.
    if how != "none":
        quantise_linears(model, how, torch.device("cpu"))
    return SuperModel(model.to(device), compiled=compiled)


def train(how: str, device: torch.device, *, compiled: bool, steps: int = 12) -> list[list[float]]:
    model = super_model(how, device, compiled=compiled)
    engine = Engine(model, budget_tokens=1024, bucket_step=1024)
    drivers = []
    for name, rank, dropout in (("a", 8, 0.0), ("b", 20, 0.1)):
        generator = np.random.default_rng(rank)
        lengths = generator.integers(8, 90, 4 * steps).tolist()
        rows = [generator.integers(1, 6, length) for length in lengths]
        spec = JobSpec(
            name=name,
            data=DataSpec(path="none"),
            lora=LoraSpec(r=rank, lora_dropout=dropout),
            train=TrainSpec(batch_size=4, max_steps=steps, learning_rate=5e-3, seed=rank),
        )
        driver = JobDriver(spec, [TokenSequence(row, row) for row in rows])
        driver.attach(engine, model.new_adapter(spec))
        drivers.append(driver)
    losses: dict[str, list[float]] = {"a": [], "b": []}
    outcomes = []
    for _ in range(steps):
        for driver in drivers:
            driver.advance(engine)
        outcomes.append(engine.run_nano_batch())
        for done in outcomes[-1].steps:
            {each.name: each for each in drivers}[done.job].on_step(done)
    outcomes += engine.drain()
    for outcome in outcomes:
        assert not outcome.error and not outcome.failures
        for done in outcome.steps:
            losses[done.job].append(done.loss)
    assert (model.captures >= 1) is (compiled and device.type == "cuda")
    return [losses["a"], losses["b"]]


@pytest.mark.parametrize("how", ["nf4", "fp8"])
def test_jobs_train_as_on_a_cpu_plain_and_captured(how: str, always_captured) -> None:
    """Which computes what the definitions say."""
    wanted = train(how, torch.device("cpu"), compiled=False)
    for compiled in (False, True):
        found = train(how, CUDA, compiled=compiled)
        for ours, theirs in zip(found, wanted, strict=True):
            assert len(ours) == 12
            assert ours[-1] < ours[0] - 0.5, "it learns, so a wrong gradient shows"
            assert np.allclose(ours, theirs, rtol=0, atol=0.05)
            assert not np.allclose(ours, theirs[::-1], rtol=0, atol=0.05)


def test_exact_isolation_holds_in_four_bits(monkeypatch) -> None:
    """In bfloat16, two layers of a 1B model: the proof passes, jobs have the same bits."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("gpu_exact")
    figures = script.Figures("test", 600, CUDA)
    base = script.random_model("llama-1b", CUDA, layers=2)
    quantise_linears(base, "nf4", CUDA)
    model = script.SuperModel(base, per_sequence=True, reserve_rows=512)
    script.prove_exact(model, 2048, ranks={8, 16}, lengths=script.LENGTHS)
    script.check_bits(model, 2048, 3, figures, exact=True)
    assert figures.values["bits_exact"]["all_same"]
