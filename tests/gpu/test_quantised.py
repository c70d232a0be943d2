"""Weights in fewer bits on a CUDA device: what it has to show, and what it does at the shapes of an
8B model.

python -m pytest tests/gpu/test_quantised.py -q -s      # prints how far products are off
"""

import importlib
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tlora.core.job import DataSpec, JobSpec, LoraSpec, TrainSpec
from tlora.core.sequence import TokenSequence
from tlora.kernels.quantised import dense, devices, fp8, nf4, proving, quantise, quantised_bytes
from tlora.kernels.quantised.weights import FORMATS, Format
from tlora.model.launches import Launches
from tlora.model.quantising import quantise_linears
from tlora.model.super_model import SuperModel
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
DEVICE = "cuda"
CUDA = torch.device(DEVICE)
VOCABULARY = 512
GROUPS = [(4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,))]
ROWS = [1, 17, 300, 8192]

# Of the norm. Half of bfloat16's last place is 2e-3.
OF_A_PRODUCT = 5e-3


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(devices, "_without_kernels", set())
    monkeypatch.setattr(devices, "_without_products", set())
    proving._prove.cache_clear()
    yield
    proving._prove.cache_clear()


@pytest.fixture
def always_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a shape's third run on, however fast the host is."""
    monkeypatch.setattr(Launches, "bound", property(lambda self: self.runs >= 2))


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).bfloat16()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("how", FORMATS)
def test_this_device_is_right(fresh, how: Format, caplog):
    """Asked for without its number, as a job file does."""
    with caplog.at_level(logging.WARNING):
        proving.prove(torch.device("cuda"), how)
    assert not caplog.records, caplog.text
    device = values(1).device
    assert devices.device_serves(device)
    capability = torch.cuda.get_device_capability(device)
    assert devices.has_products(device) is (capability >= devices.PRODUCTS_FROM)


@pytest.mark.parametrize(("into", "outs"), GROUPS)
@pytest.mark.parametrize("rows", ROWS)
def test_products_are_those_of_the_rounded_values(into: int, outs: tuple[int, ...], rows: int):
    """Forward and, over all columns of a group at once, dX; in float64."""
    # X begins like the first weight: a sum of all its values squared has one sign.
    x, dy = values(rows, into), [values(rows, out, seed=out) for out in outs]
    kept = [quantise(0.02 * values(out, into, seed=i), "fp8") for i, out in enumerate(outs)]
    weights, scales = [each.values for each in kept], [each.scales for each in kept]
    if not fp8.multiplies(x, weights):
        pytest.skip("products are not of FP8 values here")
    rounded = fp8.dense(*fp8.quantise_rows_plainly([x]), torch.float32).double()
    errors = []
    for y, weight in zip(fp8.linears(x, weights, scales, [None] * len(outs)), kept, strict=True):
        errors.append(error(y, rounded @ fp8.dense(*weight, torch.float32).double().t()))
        assert error(1.01 * y, y) > OF_A_PRODUCT
    rounded = fp8.dense(*fp8.quantise_rows_plainly(dy, torch.cat(scales)), torch.float32).double()
    right = rounded @ torch.cat([weight.double() for weight in weights])
    errors.append(error(fp8.input_gradient(dy, scales, fp8.turned(weights)), right))
    print(f"\n{rows} rows, {into} to {outs}: {', '.join(f'{each:.1e}' for each in errors)}")
    assert max(errors) < OF_A_PRODUCT


def test_no_row_of_a_product_depends_on_another():
    x = values(300, 4096)
    weight, scale = quantise(0.02 * values(1024, 4096, seed=1), "fp8")
    if not fp8.multiplies(x, [weight]):
        pytest.skip("products are not of FP8 values here")
    (before,) = fp8.linears(x, [weight], [scale], [None])
    x[150:] *= 1e3
    (after,) = fp8.linears(x, [weight], [scale], [None])
    assert torch.equal(before[:150], after[:150])
    assert not torch.equal(before[150:], after[150:])


def test_a_weight_of_more_values_than_an_int32_is_unpacked_to_its_end():
    rows, columns = 40_000, 65_536
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("too little memory")
    blocks = rows * columns // nf4.BLOCK
    packed = torch.zeros(blocks * nf4.BLOCK // 2, dtype=torch.uint8, device=DEVICE)
    scales = torch.ones(blocks, device=DEVICE)
    last = values(nf4.BLOCK)
    packed[-nf4.BLOCK // 2 :], scales[-1:] = nf4.quantise(last)
    found = dense(packed, scales, (rows, columns), torch.bfloat16)
    wanted = nf4.dense(*nf4.quantise(last), (1, nf4.BLOCK), torch.bfloat16)[0]
    assert torch.equal(found[-1, -nf4.BLOCK :], wanted)
    assert found[-1, -nf4.BLOCK - 1] == found[0, 0] == -1


@pytest.mark.parametrize("how", FORMATS)
def test_no_more_is_held_than_is_counted(how: Format):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    kept = quantise(values(14336, 4096), how)
    turned = fp8.turned([kept.values]) if how == "fp8" else None
    held = torch.cuda.memory_allocated() - before
    assert held <= 1.001 * quantised_bytes(14336, 4096, how) + 2**20
    del kept, turned


@pytest.mark.parametrize("shape", [(14336, 4096), (1024, 4096), (4096, 14336), (128256, 4096)])
def test_large_weights_are_unpacked_to_the_same_bits(shape: tuple[int, int]) -> None:
    """The last has 525 million values."""
    packed, scales = nf4.quantise(values(*shape))
    from tlora.kernels.quantised import triton_nf4

    found = triton_nf4.dense(packed, scales, shape, torch.bfloat16)
    blocks = found.view(-1, nf4.BLOCK)
    pairs = nf4._pairs(found.device)
    for first in range(0, len(scales), 1 << 20):
        some = packed.view(-1, nf4.BLOCK // 2)[first : first + (1 << 20)]
        wanted = (pairs[some.int()].view(-1, nf4.BLOCK) * scales[first:][: len(some), None]).to(
            torch.bfloat16
        )
        assert torch.equal(blocks[first : first + (1 << 20)], wanted)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < devices.ROUNDS_FROM,
    reason="the kernel rounds from Hopper on",
)
@pytest.mark.parametrize("widths", [(4096,), (4096, 1024, 1024), (14336, 14336)])
def test_large_rows_are_quantised_to_the_same_bits(widths: tuple[int, ...]) -> None:
    from tlora.kernels.quantised import triton_fp8

    parts = [values(1111, width, seed=i) for i, width in enumerate(widths)]
    factors = values(sum(widths), seed=9).float().abs()
    for given in (None, factors):
        found = triton_fp8.quantise_rows(parts, given)
        wanted = fp8.quantise_rows_plainly(parts, given)
        assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))
        assert torch.equal(found[1], wanted[1])


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
