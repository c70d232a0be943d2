"""Compiled layers and captured graphs on a CUDA device: the same steps, and nothing compiled or
captured anew when jobs come and go."""

from typing import get_args

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tlora.core.job import DataSpec, EvalSpec, JobSpec, LoraSpec, Quantization, TrainSpec
from tlora.core.sequence import TokenSequence
from tlora.kernels.multi_lora import settings
from tlora.kernels.multi_lora.blocks import Blocks
from tlora.model.compiling import graphs_compiled
from tlora.model.launches import Launches
from tlora.model.quantising import quantise_linears
from tlora.model.super_model import SuperModel
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine
from tlora.training.outcome import Outcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

VOCABULARY = 512


@pytest.fixture(autouse=True)
def always_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a shape's third run on, however fast the host is."""
    monkeypatch.setattr(Launches, "bound", property(lambda self: self.runs >= 2))


def super_model(
    *, compiled: bool, reserve_rows: int = 64, quantization: Quantization = "none"
) -> SuperModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    if quantization != "none":
        quantise_linears(model, quantization, torch.device("cuda"))
    return SuperModel(model, compiled=compiled, reserve_rows=reserve_rows)


def driver(
    name: str, rank: int, steps: int, dropout: float = 0.0, *, evaluated: bool = False
) -> JobDriver:
    generator = np.random.default_rng(rank)
    # No two nano-batches have the same segments: a graph that kept old lists would show.
    lengths = generator.integers(8, 90, 4 * steps).tolist()
    ids = [generator.integers(1, 6, length) for length in lengths]
    spec = JobSpec(
        name=name,
        data=DataSpec(path="none"),
        lora=LoraSpec(r=rank, lora_dropout=dropout),
        train=TrainSpec(
            batch_size=4,
            max_steps=steps,
            learning_rate=5e-3,
            seed=rank,
        ),
        eval=EvalSpec(steps=1 if evaluated else None),
    )
    rows = [TokenSequence(each, each) for each in ids]
    return JobDriver(spec, rows, rows[:8] if evaluated else None)


class Run:
    def __init__(self, **settings) -> None:
        self.model = super_model(**settings)
        self.engine = Engine(self.model, budget_tokens=1024, bucket_step=1024)
        self.drivers: dict[str, JobDriver] = {}
        self.losses: dict[str, list[float]] = {}
        self.evaluations: dict[str, list[float]] = {}

    def attach(
        self,
        name: str,
        rank: int,
        *,
        steps: int = 20,
        dropout: float = 0.0,
        evaluated: bool = False,
    ) -> None:
        self.drivers[name] = driver(name, rank, steps, dropout, evaluated=evaluated)
        self.drivers[name].attach(self.engine, self.model.new_adapter(self.drivers[name].spec))

    def detach(self, name: str) -> None:
        self.engine.detach(name)
        del self.drivers[name]

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for each in self.drivers.values():
                each.advance(self.engine)
            self._heard(self.engine.run_nano_batch())

    def drain(self) -> None:
        for outcome in self.engine.drain():
            self._heard(outcome)

    def _heard(self, outcome: Outcome) -> None:
        assert not outcome.error and not outcome.failures
        for done in outcome.steps:
            self.drivers[done.job].on_step(done)
            self.losses.setdefault(done.job, []).append(done.loss)
        for done in outcome.evaluations:
            self.drivers[done.job].on_evaluation(done, self.engine)
            self.evaluations.setdefault(done.job, []).append(done.loss)


@pytest.mark.parametrize("quantization", get_args(Quantization))
def test_captured_steps_train_as_plain_ones(quantization: Quantization) -> None:
    """Losses over twelve steps, with dropout; in another order they would be told apart."""
    plain, captured = (
        Run(compiled=compiled, quantization=quantization) for compiled in (False, True)
    )
    for run in (plain, captured):
        run.attach("a", 8)
        run.attach("b", 20, dropout=0.1)
        run.step(12)
        run.drain()
    assert plain.model.captures == 0
    assert captured.model.captures >= 1
    for job, losses in plain.losses.items():
        assert len(losses) == 12
        assert losses[-1] < losses[0] - 0.5, "it learns, so a wrong gradient shows"
        assert np.allclose(captured.losses[job], losses, rtol=0, atol=0.05)
        assert not np.allclose(captured.losses[job], losses[::-1], rtol=0, atol=0.05)


def come_and_go(run: Run) -> None:
    run.detach("a")
    run.step(2)
    run.attach("c", 32)
    run.step(2)
    run.attach("d", 5)
    run.step(2)


def test_jobs_come_and_go_without_compiling_or_capturing() -> None:
    """And train as in a plain run."""
    plain, captured = Run(compiled=False), Run(compiled=True)
    for run in (plain, captured):
        run.attach("a", 8)
        run.attach("b", 16)
        run.step(5)
    graphs, captures = graphs_compiled(), captured.model.captures
    assert captures == 1
    for run in (plain, captured):
        come_and_go(run)
    assert captured.model.captures == captures
    assert graphs_compiled() == graphs
    for job, losses in plain.losses.items():
        assert np.allclose(captured.losses[job], losses, rtol=0, atol=0.05)


def test_a_graph_with_old_lists_would_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: lists that are no longer copied once it is captured."""
    plain, captured = Run(compiled=False), Run(compiled=True)
    for run in (plain, captured):
        run.attach("a", 8)
        run.attach("b", 16)
        run.step(5)
    monkeypatch.setattr(Blocks, "copy", lambda self, segments, found=None: None)
    captured.step(6)
    monkeypatch.undo()
    plain.step(6)
    assert not all(
        np.allclose(captured.losses[job], losses, rtol=0, atol=0.05)
        for job, losses in plain.losses.items()
    )


def test_a_pool_that_has_grown_is_captured_again() -> None:
    """Graphs would write to where it was; the job still trains as in a plain run."""
    plain, captured = Run(compiled=False, reserve_rows=8), Run(compiled=True, reserve_rows=8)
    for run in (plain, captured):
        run.attach("a", 8)
        run.step(5)
        run.attach("b", 24)
        run.step(6)
    assert captured.model.captures == 2
    for job, losses in plain.losses.items():
        assert np.allclose(captured.losses[job], losses, rtol=0, atol=0.05)


def test_a_model_that_waits_for_its_device_trains_as_in_a_plain_run() -> None:
    """No graph can: the nano-batch that was to be captured is an ordinary one, on the stream that
    all others are on, and memory can still be freed."""
    plain, captured = Run(compiled=False), Run(compiled=True)
    norm = captured.model.model.get_submodule("model.norm")
    norm.register_forward_hook(lambda module, inputs, output: output.sum().item() and None)
    for run in (plain, captured):
        run.attach("a", 8)
        run.step(8)
        run.drain()
    assert captured.model.captures == 0 and captured.model.settled
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.empty_cache()
    assert np.allclose(captured.losses["a"], plain.losses["a"], rtol=0, atol=0.05)


def test_captured_evaluations_see_what_plain_ones_do() -> None:
    """Between steps, with graphs of their own; the adapter of the step before would be told apart,
    and so would dropout, which is off in them."""
    plain, captured = Run(compiled=False), Run(compiled=True)
    for run in (plain, captured):
        run.attach("a", 8, evaluated=True)
        run.attach("b", 20, dropout=0.3, evaluated=True)
        run.step(44)
        run.drain()
    assert captured.model.captures == 2, "one of training, one of evaluation"
    for job, losses in plain.evaluations.items():
        assert len(losses) > 8
        assert losses[-1] < losses[0] - 0.5
        assert np.allclose(captured.evaluations[job], losses, rtol=0, atol=0.05)
        assert not np.allclose(captured.evaluations[job][1:], losses[:-1], rtol=0, atol=0.05)


def test_products_with_the_update_inside_are_captured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs come and go without compiling or capturing, and train as with adapters first, in a plain
    run."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("products with the update inside are for Hopper")
    from tlora.kernels.multi_lora import triton_product

    monkeypatch.setenv("TLORA_UPDATE_INSIDE", "0")
    monkeypatch.setattr(settings, "INSIDE_TOKENS", 1024)
    plain = Run(compiled=False)
    monkeypatch.setenv("TLORA_UPDATE_INSIDE", "all")
    launched, product = [], triton_product.product
    monkeypatch.setattr(
        triton_product, "product", lambda *a, **o: launched.append(o) or product(*a, **o)
    )
    captured = Run(compiled=True)
    # Those that showed they are right there (multi_lora/proving.py), if nobody had before.
    launched.clear()
    for run in (plain, captured):
        run.attach("a", 8)
        run.attach("b", 16)
        run.step(5)
    graphs, captures, launches = graphs_compiled(), captured.model.captures, len(launched)
    # Of three layers: four groups forward and backward. Twice before the capture, where nobody asks
    # for what comes before the first q, k and v, and once in it.
    assert captures == 1 and launches == 2 * (3 * 8 - 1) + 3 * 8
    for run in (plain, captured):
        come_and_go(run)
    assert (graphs_compiled(), captured.model.captures, len(launched)) == (
        graphs, captures, launches
    )  # fmt: skip
    for job, losses in plain.losses.items():
        assert np.allclose(captured.losses[job], losses, rtol=0, atol=0.05)
