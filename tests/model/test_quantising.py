"""A model whose linears are held in fewer bits is the model of the values that these stand for."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.comparing import same_bits
from support.models import (
    job_spec,
    packed,
    random_adapter,
    save_base,
    sequences_of,
    super_gradients,
    super_logits,
    tiny_model,
)
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from tlora.core.errors import ModelError, SpecError
from tlora.core.job import BaseSpec
from tlora.core.sequence import TokenSequence
from tlora.kernels.quantised import FORMATS, QuantisedWeight, dense, fp8, quantise
from tlora.kernels.quantised.weights import Format
from tlora.model import quantising
from tlora.model.loading import load_base
from tlora.model.quantised_linear import QuantisedLinear
from tlora.model.quantising import (
    check_quantisable,
    quantise_linears,
    restore_linears,
    saved_bytes,
)
from tlora.model.routing import Routing
from tlora.model.row_probe import settle_products
from tlora.model.super_model import SuperModel
from tlora.model.targets import find_targets
from tlora.runtime import exporting

CPU = torch.device("cpu")


def quantised_model(how: str, dtype: torch.dtype = torch.float32, **settings) -> PreTrainedModel:
    model = tiny_model("qwen2", **settings).to(dtype)
    quantise_linears(model, how, CPU)
    return model


def in_full(model: PreTrainedModel) -> PreTrainedModel:
    """A plain model of the values that the quantised one stands for."""
    plain = copy.deepcopy(model)
    restore_linears(plain, find_targets(plain))
    assert not any(isinstance(module, QuantisedLinear) for module in plain.modules())
    return plain


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 40)[None], use_cache=False).logits


@pytest.mark.parametrize("how", FORMATS)
def test_linears_are_quantised_and_nothing_else(how: str) -> None:
    """Every one that can carry an adapter; embeddings, norms, biases and head stay as they were."""
    before, after = tiny_model("qwen2"), quantised_model(how)
    linears = {path: after.get_submodule(path) for path in find_targets(before)}
    assert len(linears) == 14
    assert all(isinstance(linear, QuantisedLinear) for linear in linears.values())
    assert find_targets(after) == find_targets(before)
    left = dict(after.named_parameters())
    gone = {name for name, _ in before.named_parameters()} - set(left)
    assert gone == {f"{path}.weight" for path in linears}
    assert all(same_bits(left[name], dict(before.named_parameters())[name]) for name in left)


@pytest.mark.parametrize("how", FORMATS)
def test_a_quantised_linear_computes_with_what_its_values_stand_for(how: str) -> None:
    """Bias and leading dimensions as those of the linear that it replaces."""
    torch.manual_seed(0)
    linear = nn.Linear(48, 32).requires_grad_(False)
    kept = quantise(linear.weight, how)
    found = QuantisedLinear(kept, linear)
    x = torch.randn(2, 5, 48)
    weight = dense(*kept, (32, 48), torch.float32)
    assert same_bits(found(x), F.linear(x.view(-1, 48), weight, linear.bias).view(2, 5, 32))
    assert same_bits(found.weight, weight)
    assert not torch.equal(weight, linear.weight)
    assert same_bits(found.in_full().weight, weight)


def test_a_quantised_linear_multiplies_in_fp8_what_is_bfloat16() -> None:
    """As the super-model will; its bias once."""
    torch.manual_seed(0)
    linear = nn.Linear(48, 32, dtype=torch.bfloat16).requires_grad_(False)
    kept = quantise(linear.weight, "fp8")
    x = torch.randn(2, 5, 48).bfloat16()
    (wanted,) = fp8.linears(x.view(-1, 48), [kept.values], [kept.scales], [linear.bias])
    assert same_bits(QuantisedLinear(kept, linear)(x), wanted.view(2, 5, 32))
    assert not same_bits(wanted.view(2, 5, 32), QuantisedLinear(kept, linear).in_full()(x))


def test_a_device_shows_what_it_can_before_anything_is_quantised_there(monkeypatch) -> None:
    """On the device that the model goes to, though it was loaded elsewhere."""
    asked: list[object] = []
    there = torch.device("meta")

    def quantised(weight: torch.Tensor, how: Format) -> QuantisedWeight:
        assert asked == [(there, "nf4")]
        assert weight.device == there
        return QuantisedWeight(weight, weight)

    monkeypatch.setattr(quantising, "prove", lambda *case: asked.append(case))
    monkeypatch.setattr(quantising, "quantise", quantised)
    quantise_linears(tiny_model(), "nf4", there)
    assert asked == [(there, "nf4")]


@pytest.mark.parametrize("how", FORMATS)
def test_the_model_is_that_of_its_values(how: str) -> None:
    """The logits of a plain model with these values; those of the model in full differ."""
    model = quantised_model(how)
    assert torch.allclose(logits(model), logits(in_full(model)), atol=1e-5)
    assert not torch.allclose(logits(model), logits(tiny_model("qwen2")), atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", FORMATS)
def test_adapters_train_on_a_quantised_model(how: str, dtype: torch.dtype) -> None:
    """The probe accepts it, packed rows give the logits of the plain model with the adapter."""
    model = quantised_model(how, dtype)
    plain = in_full(model)
    weights = random_adapter(plain, rank=4, seed=1)
    ours = SuperModel(model)
    ours.attach("a", weights, scale=0.5)
    rows = sequences_of([9, 5], seed=2)
    found = super_logits(ours, packed({"a": rows}))["a"]
    theirs = SuperModel(plain)
    theirs.attach("a", weights, scale=0.5)
    wanted = super_logits(theirs, packed({"a": rows}))["a"]
    error = ((found - wanted).norm() / wanted.norm()).item()
    # Products of FP8 values round activations too: measured 4e-2.
    rounded = (how, dtype) == ("fp8", torch.bfloat16)
    assert error < (1e-1 if rounded else 2e-6 if dtype == torch.float32 else 2e-2)
    assert not rounded or error > 1e-3


def test_weights_are_turned_for_what_is_multiplied_in_fp8(monkeypatch) -> None:
    """As on a GPU: the same gradients as of those that are turned for each product. They are what
    dX is made of: turned in another order they give others."""
    monkeypatch.setattr(fp8, "reads_turned", lambda device: True)
    assert all(group.turned is None for group in SuperModel(quantised_model("fp8")).groups)
    model = SuperModel(quantised_model("fp8", torch.bfloat16))
    model.attach("a", random_adapter(tiny_model("qwen2"), rank=4, seed=1), scale=0.5)
    batch = packed({"a": sequences_of([9, 5], seed=2)})

    def gradients(turned: Callable[[list[torch.Tensor]], torch.Tensor] | None) -> list:
        if turned is not None:
            for group in model.groups:
                group.turned = turned(group.weights)
        return list(super_gradients(model, batch)["a"].values())

    found = gradients(None)
    assert all(group.turned is not None for group in model.groups)
    assert all(map(same_bits, found, gradients(fp8.turned)))
    reversed_ = gradients(lambda weights: fp8.turned(weights[::-1]))
    assert not all(map(same_bits, found, reversed_))


@pytest.mark.parametrize("how", FORMATS)
def test_an_adapter_is_checked_in_float32_on_the_values(how: str) -> None:
    """As sharply as on a base in full: nothing of it is rounded to FP8 there."""
    model = SuperModel(quantised_model(how, torch.bfloat16))
    job = job_spec()
    weights = model.new_adapter(job)
    for pair in weights.values():
        pair.b.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    model.attach(job.name, weights, scale=job.lora.scale)
    ids = torch.arange(3, 22).numpy()
    assert exporting.look(model, job, TokenSequence(ids, ids)).result() < 1e-5


def test_the_proof_of_exact_isolation_has_the_products_of_the_values() -> None:
    """Of weights unpacked; products in FP8 are refused by whoever asks, a job file or not."""
    held = SuperModel(quantised_model("nf4"), per_sequence=True)
    full = SuperModel(in_full(quantised_model("nf4")), per_sequence=True)
    assert settle_products(held, 64) == settle_products(full, 64)
    refused = SuperModel(quantised_model("fp8", torch.bfloat16), per_sequence=True)
    with pytest.raises(SpecError, match="cannot be had of products in FP8") as caught:
        settle_products(refused, 64)
    assert caught.value.field == "engine.isolation"


def test_linears_without_adapters_are_put_back_in_full() -> None:
    """They are called by the model's own code, which has to differentiate and compile them."""
    model = tiny_model("bert", is_decoder=True)
    quantise_linears(model, "nf4", CPU)
    head = "cls.predictions.transform.dense"
    kept = model.get_submodule(head).weight
    ours = SuperModel(model)
    assert isinstance(model.get_submodule(head), nn.Linear)
    assert same_bits(model.get_submodule(head).weight, kept)
    assert ours.groups[0].scales is not None


def test_a_base_is_quantised_as_it_is_loaded(tmp_path: Path) -> None:
    """Biases and other weights come in the format asked for."""
    base = save_base(tmp_path / "base")
    spec = BaseSpec(model=str(base), dtype="bfloat16", quantization="nf4")
    model = load_base(spec, CPU)
    q_proj = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert isinstance(q_proj, QuantisedLinear)
    full = load_base(BaseSpec(model=str(base), dtype="bfloat16"), CPU)
    weight = full.get_submodule("model.layers.0.self_attn.q_proj").weight
    assert torch.equal(q_proj.values, quantise(weight, "nf4").values)
    assert torch.equal(q_proj.scales, quantise(weight, "nf4").scales)
    assert model.dtype == q_proj.dtype == torch.bfloat16


def test_weights_that_are_no_numbers_are_refused_by_name() -> None:
    """A block or a row of them would be lost in silence."""
    model = tiny_model()
    model.get_submodule("model.layers.1.mlp.up_proj").weight.data[3, 4] = float("nan")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj holds what is no number"):
        quantise_linears(model, "nf4", CPU)


def test_a_model_with_nothing_to_quantise_is_refused() -> None:
    """GPT-2 has its matrices the other way round."""
    for kind, can_be in (("llama", True), ("gpt2", False)):
        base = BaseSpec(model="x", quantization="nf4")
        targets = find_targets(tiny_model(kind))
        if can_be:
            check_quantisable(base, targets)
            continue
        with pytest.raises(SpecError, match="no linear whose weight") as caught:
            check_quantisable(base, targets)
        assert caught.value.field == "base.quantization"
        check_quantisable(BaseSpec(model="x"), targets)
        with pytest.raises(ModelError, match="GPT2LMHeadModel has no linear whose weight"):
            quantise_linears(tiny_model(kind), "nf4", CPU)


@pytest.mark.parametrize(("how", "itemsize"), [("nf4", 2), ("nf4", 4), ("fp8", 4)])
def test_what_is_saved_is_counted(how: str, itemsize: int) -> None:
    """As the tensors say; on a GPU FP8 keeps its weights twice."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    before, after = tiny_model().to(dtype), tiny_model().to(dtype)
    quantise_linears(after, how, CPU)
    targets = find_targets(before)
    full = sum(before.get_submodule(path).weight.nbytes for path in targets)
    linears = [after.get_submodule(path) for path in targets]
    kept = sum(each.values.nbytes + each.scales.nbytes for each in linears)
    turned = sum(each.values.nbytes for each in linears) if how == "fp8" else 0
    assert saved_bytes(targets.values(), how, itemsize) == full - kept - turned


def test_a_path_that_is_off_is_refused_where_products_are_in_fp8(monkeypatch) -> None:
    """What their rounding hides is seen in float32."""
    honest = Routing.attention

    def off(self, *arguments, scaling=None, **settings):
        return honest(self, *arguments, scaling=1.01 * scaling, **settings)

    monkeypatch.setattr(Routing, "attention", off)
    with pytest.raises(ModelError, match="gives other logits for packed"):
        SuperModel(quantised_model("fp8", torch.bfloat16))
