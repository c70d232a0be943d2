"""Layers that run again in backward: the same gradients, no S made twice, and little held until
then; as they were written and compiled."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from support.models import (
    packed,
    random_adapter,
    sequences_of,
    super_gradients,
    super_model,
    tiny_model,
)
from torch import nn

from tlora.kernels import row_tiles
from tlora.kernels.multi_lora import cpu, native
from tlora.model import compiling
from tlora.model import super_model as super_models
from tlora.model.recomputing import RecomputedLayer
from tlora.model.routing import Routing
from tlora.model.super_model import SuperModel

LAYERS = 2
INDUCTOR = pytest.param("inductor", 0.5, marks=pytest.mark.slow)


def attached(kind: str, dropout: float, **settings: bool) -> SuperModel:
    plain = tiny_model(kind)
    model = super_model(plain, **settings)
    for job, rank in (("a", 2), ("b", 5)):
        weights = random_adapter(plain, rank=rank, seed=rank)
        model.attach(job, weights, scale=1.0, dropout=dropout)
    return model


def nano_batch():
    return packed({"a": sequences_of([9, 5], seed=5), "b": sequences_of([7], seed=6)})


@contextmanager
def compiled_by(backend: str) -> Iterator[None]:
    """Layers are compiled for a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        settings = partial(compiling.compile_layers, backend=backend)
        patch.setattr(super_models, "compile_layers", settings)
        torch._dynamo.reset()
        yield


class Products:
    """Counts products while it stands in for what computes them."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.count = 0
        self._compute = getattr(owner, name)
        patch.setattr(owner, name, self)

    def __call__(self, *arguments: object) -> object:
        self.count += 1
        return self._compute(*arguments)

    def of_a_step(self, model: SuperModel) -> int:
        """A first one compiles."""
        super_gradients(model, nano_batch())
        before = self.count
        super_gradients(model, nano_batch())
        return self.count - before


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [("llama", False), ("gpt2", False), ("llama", True), ("gpt_neox", True)],
)
def test_recomputed_layers_give_the_same_gradients_to_the_bit(kind: str, compiled: bool) -> None:
    """The same arithmetic runs again. GPT-NeoX adds attention and MLP at once."""
    with compiled_by("aot_eager"):
        kept, recomputed = (
            super_gradients(
                attached(kind, 0.2, compiled=compiled, gradient_checkpointing=on), nano_batch()
            )
            for on in (False, True)
        )
    for job, gradients in kept.items():
        assert any(map(torch.any, gradients.values()))
        assert all(torch.equal(gradients[name], recomputed[job][name]) for name in gradients)


@pytest.mark.parametrize(
    ("backend", "dropout"), [(None, 0.0), (None, 0.5), ("aot_eager", 0.5), INDUCTOR]
)
def test_no_s_is_made_twice(
    backend: str | None, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S = x A^T of every group is computed in forward and kept: no more products than without
    checkpointing, where groups that do not keep it have more. Inputs are not held on to."""
    # The path whose products can be counted; tests/kernels show that each leaves S alone.
    monkeypatch.setattr(native, "serving", lambda *tensors: None)
    products = Products(monkeypatch, cpu, "_write_product")
    counts = []
    with compiled_by(backend or "eager"):
        for checkpointing, keeps in ((False, True), (True, True), (True, False)):
            model = attached(
                "llama", dropout, gradient_checkpointing=checkpointing, compiled=backend is not None
            )
            for group in model.groups:
                group.keeps = keeps
            counts.append(products.of_a_step(model))
            assert model.routing.compiled is (backend is not None)
            for group in model.groups:
                assert group._kept is None and group._input is None
    assert counts[0] == counts[1] < counts[2]


def test_a_compiled_layer_does_not_make_its_output_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last product, that of down_proj, runs once; in a layer as it was written, twice."""
    products = Products(monkeypatch, row_tiles, "linear")
    with compiled_by("aot_eager"):
        written, compiled = (
            products.of_a_step(
                attached("llama", 0.0, gradient_checkpointing=True, compiled=compiled)
            )
            for compiled in (False, True)
        )
    assert compiled == written - LAYERS


@pytest.mark.parametrize("recomputed", [True, False])
def test_a_compiled_layer_holds_its_input_and_s(recomputed: bool) -> None:
    """Until backward, beside what all layers are given alike; one that does not run again holds
    more."""
    with compiled_by("aot_eager"):
        model = attached("llama", 0.2, compiled=True, gradient_checkpointing=recomputed)
    saved: list[list[torch.Tensor]] = []
    inputs: list[torch.Tensor] = []

    def begin(layer: nn.Module, arguments: tuple[torch.Tensor]) -> None:
        saved.append([])
        inputs.append(arguments[0])

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        if saved:
            saved[-1].append(tensor)
        return tensor

    layers = compiling.layers_of(model.model)
    for layer in layers:
        layer.register_forward_pre_hook(begin)
    # The norm after them is nobody's.
    layers[-1].register_forward_hook(lambda *_: saved.append([]))
    batch = nano_batch()
    with model.routed(batch, train=True):
        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            model.token_losses(batch)
        s_of_layer = [
            [len(batch.rows), *model.routing.route(pool).s_like.shape[1:]]
            for pool in model.pools[:4]
        ]
    addresses = [{each.data_ptr() for each in own} for own in saved[:LAYERS]]
    alike = set.intersection(*addresses)
    for own, given in zip(saved[:LAYERS], inputs, strict=True):
        known = {given.data_ptr(), *alike}
        held = [list(each.shape) for each in own if each.data_ptr() not in known]
        assert (held == s_of_layer) is recomputed


def test_a_wider_s_makes_no_new_graph() -> None:
    """Whatever the compiler knows of it."""
    with compiled_by("eager"):
        model = attached("llama", 0.0, compiled=True, gradient_checkpointing=True)
        super_gradients(model, nano_batch())
        before = compiling.graphs_compiled()
        model.attach("c", random_adapter(tiny_model(), rank=16, seed=1), scale=1.0)
        with model.routed(nano_batch(), train=True):
            widths = {model.routing.route(pool).s_like.shape[1] for pool in model.pools}
        super_gradients(model, nano_batch())
    assert max(widths) > 16
    assert compiling.graphs_compiled() == before


class Mixed(nn.Module):
    """A layer of other habits: it is given tensors and numbers by name, and gives two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, tables: tuple[torch.Tensor, torch.Tensor], power: int):
        y = self.linear(x) * tables[0] + tables[1]
        return y**power, None, x * tables[1]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_may_take_and_give_what_it_likes(compiled: bool) -> None:
    """Gradients of tensors in keywords too, and where only one output is used."""
    generator = torch.Generator().manual_seed(0)
    layer = Mixed()
    entry = RecomputedLayer(
        Routing(torch.device("cpu")),
        layer,
        partial(torch.compile, backend="aot_eager", fullgraph=True) if compiled else lambda f: f,
    )
    x, scale, offset = (torch.randn(3, 4, generator=generator) for _ in range(3))

    def run(call, used: tuple[int, ...]) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_(), scale.clone(), offset.clone().requires_grad_()]
        layer.linear.weight.grad = None
        outputs = call(leaves[0], tables=(leaves[1], leaves[2]), power=3)
        assert outputs[1] is None
        torch.autograd.backward([outputs[place].sin().sum() for place in used])
        assert leaves[1].grad is None
        gradients = [leaves[0].grad, leaves[2].grad, layer.linear.weight.grad]
        return [outputs[0].detach(), *gradients]

    for used in ((0,), (0, 2)):
        found, wanted = run(entry, used), run(layer, used)
        assert all(map(torch.equal, found, wanted))
