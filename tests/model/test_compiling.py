"""Compiled layers: the same steps, graphs that all layers share, and none for a job that comes."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.native import require_native_attention
from support.tiny import tiny_llama
from transformers import MistralConfig, MistralForCausalLM

from tlora.core.job import DataSpec, JobSpec, LoraSpec, TrainSpec
from tlora.core.sequence import TokenSequence
from tlora.kernels.quantised import fp8
from tlora.kernels.quantised.weights import Format
from tlora.model import compiling, routing, super_model
from tlora.model.compiling import graphs_compiled
from tlora.model.packing import PackedBatch, Share, pack
from tlora.model.quantising import quantise_linears
from tlora.model.recomputing import RecomputedLayer
from tlora.model.super_model import SuperModel
from tlora.runtime import exporting
from tlora.training.engine import Engine


def dense_attention(q, k, v, boundaries, longest, *, scale, window=None, repeatable=False):
    """What the variable-length kernel gives, in operations that compile without a GPU."""
    assert window is None
    rows = torch.arange(q.shape[0])
    sequence = torch.bucketize(rows.int(), boundaries, right=True)
    seen = (sequence[:, None] == sequence) & (rows[:, None] >= rows)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return out[0].transpose(0, 1)


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where attention is one operator, with a compiler that leaves operations as they
    are."""
    load = routing.Routing._load

    def load_with_boundaries(self, batch, *others) -> None:
        load(self, batch, *others)
        self._load_boundaries(batch)

    monkeypatch.setattr(routing, "supports", lambda query, softcap, sinks: True)
    monkeypatch.setattr(routing, "varlen_attention", dense_attention)
    monkeypatch.setattr(routing.Routing, "_load", load_with_boundaries)
    traced = partial(compiling.compile_layers, backend="aot_eager")
    monkeypatch.setattr(super_model, "compile_layers", traced)
    torch._dynamo.reset()


def spec(name: str, rank: int, dropout: float = 0.0) -> JobSpec:
    return JobSpec(
        name=name,
        data=DataSpec(path="none"),
        lora=LoraSpec(r=rank, lora_dropout=dropout),
        train=TrainSpec(),
    )


def attach(model: SuperModel, name: str, rank: int, dropout: float = 0.0) -> None:
    job = spec(name, rank, dropout)
    weights = model.new_adapter(job)
    for pair in weights.values():
        pair.b.normal_(std=0.1, generator=torch.Generator().manual_seed(rank))
    model.attach(name, weights, scale=job.lora.scale, dropout=dropout)


def batch_of(model: SuperModel, num_rows: int, seed: int) -> PackedBatch:
    generator = np.random.default_rng(seed)
    shares = []
    for number, job in enumerate(model.jobs):
        ids = [generator.integers(1, 60, length) for length in (3 + number, 5)]
        sequences = [TokenSequence(each, each) for each in ids]
        shares.append(Share(job, sequences, [0, len(ids[0])], [0.5, 0.25], key=number))
    return pack(shares, num_rows)


def step(model: SuperModel, num_rows: int, seed: int) -> list[torch.Tensor]:
    """Losses and gradients; the pools are left without."""
    batch = batch_of(model, num_rows, seed)
    with model.routed(batch, train=True):
        losses = model.token_losses(batch)
        torch.autograd.backward(losses, batch.loss_scales)
    found = [losses.detach()]
    for job in model.jobs:
        for rows in model.views(job).values():
            found.append(rows.grad.clone())
            rows.grad.zero_()
    return found


def evaluate(model: SuperModel, num_rows: int) -> torch.Tensor:
    batch = batch_of(model, num_rows, 0)
    with torch.no_grad(), model.routed(batch, train=False):
        return model.token_losses(batch)


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_compiled_layers_give_the_same_losses_and_gradients(on_any_device: None) -> None:
    """At every size, with dropout, and in evaluation; another seed does not."""
    plain, compiled = SuperModel(tiny_llama()), SuperModel(tiny_llama(), compiled=True)
    for model in (plain, compiled):
        attach(model, "a", 4)
        attach(model, "b", 6, dropout=0.2)
    before = graphs_compiled()
    for num_rows in (32, 48, 64, 32):
        wanted = step(plain, num_rows, num_rows)
        assert same(step(compiled, num_rows, num_rows), wanted)
        assert not same(step(compiled, num_rows, 1), wanted)
    assert torch.equal(evaluate(compiled, 32), evaluate(plain, 32))
    assert graphs_compiled() > before


@pytest.mark.parametrize(("recomputed", "exact"), [(True, False), (False, True), (True, True)])
def test_compiled_layers_may_be_recomputed_or_exact(
    on_any_device: None, recomputed: bool, exact: bool
) -> None:
    """The same losses and gradients as without the compiler; nothing is kept once a step is over,
    and no graph is made for a second one. The same losses in evaluation."""
    settings = {"gradient_checkpointing": recomputed, "per_sequence": exact}
    plain, compiled = (
        SuperModel(tiny_llama(), **settings),
        SuperModel(tiny_llama(), compiled=True, **settings),
    )
    for model in (plain, compiled):
        attach(model, "a", 4)
        attach(model, "b", 6, dropout=0.2)
    assert same(step(compiled, 32, 0), step(plain, 32, 0))
    before = graphs_compiled()
    assert same(step(compiled, 32, 1), step(plain, 32, 1))
    assert graphs_compiled() == before
    assert not any(group._kept is not None for group in compiled.groups)
    assert torch.equal(evaluate(compiled, 32), evaluate(plain, 32))
    assert not any(group._kept is not None for group in compiled.groups)


@pytest.mark.parametrize("recomputed", [False, True])
def test_all_layers_share_their_graphs(on_any_device: None, recomputed: bool) -> None:
    """One for the first layer, whose input has no gradient, and one for all others; where they are
    recomputed, one more for the first run of all. As many for a second size, none for a third."""
    model = SuperModel(tiny_llama(), compiled=True, gradient_checkpointing=recomputed)
    attach(model, "a", 4)
    counts = [graphs_compiled()]
    for num_rows in (32, 48, 64):
        step(model, num_rows, 0)
        counts.append(graphs_compiled())
    each = 3 if recomputed else 2
    assert [after - before for before, after in pairwise(counts)] == [each, each, 0]


@pytest.mark.parametrize("recomputed", [False, True])
def test_jobs_come_and_go_without_a_new_graph(on_any_device: None, recomputed: bool) -> None:
    """Other ranks, pools that grow, a wider S, the first dropout."""
    model = SuperModel(
        tiny_llama(), reserve_rows=4, compiled=True, gradient_checkpointing=recomputed
    )
    attach(model, "a", 4)
    step(model, 32, 0)
    before = graphs_compiled()
    attach(model, "b", 6)
    step(model, 32, 1)
    attach(model, "c", 1, dropout=0.1)
    step(model, 32, 2)
    model.detach("a")
    step(model, 32, 3)
    attach(model, "d", 16)
    step(model, 32, 4)
    assert graphs_compiled() == before


def test_sizes_that_are_not_marked_would_be_compiled_for(
    on_any_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: what the test above counts can rise."""
    monkeypatch.setattr(super_model, "varies", lambda tensor, dim: None)
    model = SuperModel(tiny_llama(), reserve_rows=4, compiled=True)
    attach(model, "a", 4)
    step(model, 32, 0)
    before = graphs_compiled()
    attach(model, "b", 6)
    step(model, 32, 0)
    assert graphs_compiled() > before


@pytest.fixture
def traced_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `engine.compile: true` on a CPU, with a compiler that leaves operations as they are."""
    traced = partial(compiling.compile_layers, backend="aot_eager")
    monkeypatch.setattr(super_model, "compile_layers", traced)
    torch._dynamo.reset()


def test_layers_compile_on_a_cpu_too(traced_on_the_cpu: None) -> None:
    """Losses and gradients to rounding, and no graph more from the second size on."""
    plain, compiled = SuperModel(tiny_llama()), SuperModel(tiny_llama(), compiled=True)
    for model in (plain, compiled):
        attach(model, "a", 4)
        attach(model, "b", 6, dropout=0.2)
    graphs = []
    for num_rows in (32, 48, 64, 40):
        found, wanted = step(compiled, num_rows, num_rows), step(plain, num_rows, num_rows)
        for left, right in zip(found, wanted, strict=True):
            assert (left - right).norm() <= 1e-5 * right.norm()
        graphs.append(graphs_compiled())
    assert compiled.routing.compiled
    assert graphs[1] == graphs[2] == graphs[3]


@pytest.mark.parametrize("recomputed", [False, True])
def test_an_adapter_is_checked_through_layers_that_are_not_compiled(
    traced_on_the_cpu: None, recomputed: bool
) -> None:
    """What is written is compared in float32, with hooks on linears: no graph is made of that, and
    the layers are compiled again afterwards."""
    model = SuperModel(tiny_llama().bfloat16(), compiled=True, gradient_checkpointing=recomputed)
    attach(model, "a", 4)
    step(model, 32, 0)
    before = graphs_compiled()
    ids = np.arange(1, 20)
    looked = exporting.look(model, spec("a", 4), TokenSequence(ids, ids))
    assert looked.result() < 1e-4
    assert graphs_compiled() == before
    for layer in compiling.layers_of(model.model):
        assert (
            isinstance(layer.forward, RecomputedLayer) if recomputed else layer._compiled_call_impl
        )
    assert model.routing.compiled
    step(model, 32, 0)
    assert graphs_compiled() == before


class Given:
    """Graphs that capture nothing, and note for which shapes that was given up."""

    def __init__(self, model: SuperModel) -> None:
        self.model = model
        self.given_up: list[object] = []

    def begin(self) -> None: ...

    def hidden(self, batch: PackedBatch, key: object) -> torch.Tensor:
        assert self.model._head is not None
        return self.model._head.hidden(batch.input_ids, batch.position_ids)

    def give_up(self, key: object) -> None:
        self.given_up.append(key)


def test_a_look_in_float32_keeps_no_shape_from_being_captured(
    on_any_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention in float32 asks for the lengths of sequences, and no graph can. Training in
    bfloat16 does not; where it does, it is given up."""
    served = {torch.bfloat16}
    monkeypatch.setattr(routing, "supports", lambda query, softcap, sinks: query.dtype in served)
    monkeypatch.setattr(routing.Routing, "shape", property(lambda self: ("a shape",)))
    model = SuperModel(tiny_llama().bfloat16())
    attach(model, "a", 4)
    graphs = model._graphs = Given(model)
    ids = np.arange(1, 20)
    exporting.look(model, spec("a", 4), TokenSequence(ids, ids)).result()
    step(model, 32, 0)
    assert not graphs.given_up
    served.clear()
    step(model, 32, 0)
    assert len(graphs.given_up) == 1


@pytest.mark.parametrize("recomputed", [False, True])
def test_an_engine_goes_on_where_nothing_can_be_compiled(
    monkeypatch: pytest.MonkeyPatch, recomputed: bool
) -> None:
    """A machine without a compiler: the first nano-batch is told as an error and run again, and
    every step is that of a plain run. Layers are recomputed as before."""

    def no_compiler(graph, inputs):
        raise RuntimeError("no compiler here")

    traced = partial(compiling.compile_layers, backend=no_compiler)
    monkeypatch.setattr(super_model, "compile_layers", traced)
    torch._dynamo.reset()
    losses = []
    for compiled in (False, True):
        model = SuperModel(tiny_llama(), compiled=compiled, gradient_checkpointing=recomputed)
        engine = Engine(model, budget_tokens=64)
        weights = engine.super_model.new_adapter(spec("a", 4))
        engine.attach("a", weights, scale=1.0)
        ids = np.arange(1, 20)
        engine.feed("a", [TokenSequence(ids, ids)] * 2, loss_scale=0.1)
        engine.request_step("a", learning_rate=1e-2)
        outcomes = [engine.run_nano_batch()]
        if compiled:
            assert "no compiler here" in str(outcomes[0].error)
            assert not outcomes[0].failures
            outcomes.append(engine.run_nano_batch())
            assert not model.routing.compiled
            layers = compiling.layers_of(model.model)
            assert all(layer.gradient_checkpointing is recomputed for layer in layers)
            assert all("forward" not in layer.__dict__ for layer in layers)
        (done,) = outcomes[-1].steps
        losses.append((done.loss, done.grad_norm))
    assert losses[0] == losses[1]


def losses_in_a_window(*, compiled: bool) -> tuple[SuperModel, list[float]]:
    """A sliding window on a CPU, over three steps, two of which compile nothing."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=4,
    )
    torch._dynamo.reset()
    model = SuperModel(MistralForCausalLM(config), compiled=compiled)
    engine = Engine(model, budget_tokens=64)
    engine.attach("a", model.new_adapter(spec("a", 4)), scale=1.0)
    losses, graphs = [], []
    for length in (20, 30, 40):
        ids = np.arange(1, length)
        engine.feed("a", [TokenSequence(ids, ids)], loss_scale=0.1)
        engine.request_step("a", learning_rate=1e-2)
        losses += [step.loss for step in engine.run_nano_batch().steps]
        graphs.append(graphs_compiled())
    assert len(set(graphs)) == 1
    return model, losses


def test_attention_that_cannot_be_compiled_is_run_as_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window without attention in C: the probe sees it, and no nano-batch breaks off for it.
    Ranks that hold the backbone in shards could not make up for one with every version of torch."""
    monkeypatch.setattr(routing.native, "serves", lambda *_: False)
    model, losses = losses_in_a_window(compiled=True)
    assert not model.routing.compiled
    assert "layers are not compiled: attention in float32" in caplog.text
    assert len(losses) == 3


def test_windows_are_compiled_where_attention_is_in_c() -> None:
    """Without counting in Python: sequences of any length share a graph."""
    require_native_attention()
    model, losses = losses_in_a_window(compiled=True)
    assert model.routing.compiled
    _, wanted = losses_in_a_window(compiled=False)
    assert losses == pytest.approx(wanted, rel=1e-5) and len(losses) == 3


def test_checks_in_float32_keep_no_layer_of_a_half_precision_model_from_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, attention is compiled in half precision and not in float32, in which the probe
    checks such a model as well. Training is in half precision: that is what counts."""
    seen = []

    def half_only(query: torch.Tensor, *_: object) -> bool:
        seen.append(query.dtype)
        return query.dtype == torch.bfloat16

    monkeypatch.setattr(routing.native, "serves", lambda *_: False)
    monkeypatch.setattr(routing.grouped, "serves", half_only)
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        torch._dynamo.reset()
        model = SuperModel(tiny_llama().to(dtype), compiled=True)
        found[dtype] = model.routing.compiled
    assert found == {torch.bfloat16: True, torch.float32: False}
    assert {torch.bfloat16, torch.float32} == set(seen)


@pytest.mark.parametrize(
    ("how", "dtype"), [("nf4", torch.float32), ("nf4", torch.bfloat16), ("fp8", torch.bfloat16)]
)
def test_layers_on_quantised_weights_share_their_graphs(
    on_any_device: None, how: Format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same losses and gradients as uncompiled, also recomputed in backward, and no graph more
    than for weights in full."""
    monkeypatch.setattr(fp8, "reads_turned", lambda device: True)
    plain, compiled, recomputed = (
        quantised_llama(how, dtype, **settings)
        for settings in ({}, {"compiled": True}, {"compiled": True, "gradient_checkpointing": True})
    )
    for model in (plain, compiled, recomputed):
        attach(model, "a", 4)
        attach(model, "b", 6, dropout=0.2)
    wanted = step(plain, 32, 0)
    before = graphs_compiled()
    assert same(step(compiled, 32, 0), wanted)
    assert graphs_compiled() == before + 2
    assert same(step(recomputed, 32, 0), wanted)


def quantised_llama(how: Format, dtype: torch.dtype, **settings: bool) -> SuperModel:
    """With weights turned for dX where products are of FP8, as on a GPU."""
    base = tiny_llama().to(dtype)
    quantise_linears(base, how, torch.device("cpu"))
    model = SuperModel(base, **settings)
    assert any(group.turned is not None for group in model.groups) is (how == "fp8")
    return model
