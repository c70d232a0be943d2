"""Many adapters on one frozen backbone: each gets what a plain hooked model would give it."""

import copy
import gc
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.models import (
    SUPPORTED,
    WINDOWED,
    job_spec,
    largest_error,
    packed,
    plain_gradients,
    plain_logits,
    random_adapter,
    sequences_of,
    super_gradients,
    super_logits,
    super_model,
    tiny_model,
)
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from tlora.core.sequence import TokenSequence
from tlora.model.adapters import AdapterWeights, LoraPair
from tlora.model.super_model import SuperModel

# Over the largest value. Measured on the twelve architectures with two seeds each: logits up to
# 1e-6, gradients up to 2.5e-6; a scale off by 1 % gives at least 3e-3.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Tenant:
    weights: AdapterWeights
    scale: float
    sequences: list[TokenSequence]


@dataclass(frozen=True)
class Scene:
    """Two jobs on a model: one adapts everything, the other a single name with another rank."""

    plain: PreTrainedModel
    model: SuperModel
    tenants: dict[str, Tenant]

    @property
    def batch(self):
        return packed({job: tenant.sequences for job, tenant in self.tenants.items()})


def attached(model: SuperModel, tenants: dict[str, Tenant]) -> SuperModel:
    for job, tenant in tenants.items():
        model.attach(job, tenant.weights, scale=tenant.scale)
    return model


@pytest.fixture(scope="module", params=SUPPORTED)
def scene(request: pytest.FixtureRequest) -> Scene:
    plain = tiny_model(request.param)
    model = super_model(plain)
    first_leaf = next(iter(model.targets.values())).leaf
    tenants = {
        "wide": Tenant(random_adapter(plain, rank=3, seed=1), 0.7, sequences_of([19, 7], seed=3)),
        "narrow": Tenant(
            random_adapter(plain, rank=5, seed=2, leaves=[first_leaf]),
            1.5,
            # Two of a length, which attention may take together, and one of a single token.
            sequences_of([23, 19, 19, 1], seed=4),
        ),
    }
    return Scene(plain, attached(model, tenants), tenants)


def test_packed_logits_equal_the_plain_model_with_each_adapter(scene: Scene) -> None:
    """Sequence by sequence, with the model's own eager attention; sequences exceed the windows."""
    found = super_logits(scene.model, scene.batch)
    for job, tenant in scene.tenants.items():
        plain = plain_logits(scene.plain, tenant.weights, tenant.scale, tenant.sequences)
        twin = plain_logits(scene.plain, tenant.weights, 1.01 * tenant.scale, tenant.sequences)
        assert largest_error(found[job], plain) < TOLERANCE
        assert largest_error(found[job], twin) > TOLERANCE


def test_gradients_equal_those_of_the_plain_model(scene: Scene) -> None:
    """Every A and every B of both jobs, and a twin with its scale off by 1 % is told apart."""
    found = super_gradients(scene.model, scene.batch)
    for job, tenant in scene.tenants.items():
        plain = plain_gradients(scene.plain, tenant.weights, tenant.scale, tenant.sequences)
        twin = plain_gradients(scene.plain, tenant.weights, 1.01 * tenant.scale, tenant.sequences)
        assert found[job].keys() == plain.keys()
        for name, gradient in found[job].items():
            assert largest_error(gradient, plain[name]) < TOLERANCE, name
            assert largest_error(gradient, twin[name]) > TOLERANCE, name


def test_frozen_weights_get_no_gradient_and_do_not_change(scene: Scene) -> None:
    """Neither in the base nor in the pool's values, which only an optimiser may move."""
    before = scene.model.weights("wide")
    super_gradients(scene.model, scene.batch)
    base = dict(scene.plain.named_parameters())
    for name, parameter in scene.model.model.named_parameters():
        assert parameter.grad is None and not parameter.requires_grad
        assert torch.equal(parameter, base[name])
    for path, pair in scene.model.weights("wide").items():
        assert torch.equal(pair.a, before[path].a) and torch.equal(pair.b, before[path].b)


@pytest.mark.parametrize("kind", WINDOWED)
def test_the_windows_of_these_tests_matter(kind: str) -> None:
    """Without them the same model gives other logits: the comparisons above can fail."""
    model = tiny_model(kind)
    without = copy.deepcopy(model)
    for owner in (without.config, *without.modules()):
        if getattr(owner, "sliding_window", None) is not None:
            owner.sliding_window = 64
    sequences = sequences_of([23], seed=3)
    windowed, full = (plain_logits(m, {}, 1.0, sequences).detach() for m in (model, without))
    assert largest_error(windowed, full) > 0.01


def test_the_soft_caps_of_these_tests_matter() -> None:
    """As for the windows."""
    model = tiny_model("gemma2")
    uncapped = tiny_model("gemma2", attn_logit_softcapping=None)
    sequences = sequences_of([23], seed=3)
    capped, free = (plain_logits(m, {}, 1.0, sequences).detach() for m in (model, uncapped))
    assert largest_error(capped, free) > 0.01


def test_models_made_from_one_config_each_get_a_super_model() -> None:
    """Both give the gradients of the plain model, the first also after the second has come, and the
    config still makes models with its own attention."""
    plain = tiny_model()
    config = copy.deepcopy(plain.config)
    tenant = Tenant(random_adapter(plain, rank=3, seed=1), 0.7, sequences_of([9, 5], seed=5))
    models = []
    for _ in range(2):
        model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(plain.state_dict())
        assert model.config is config
        models.append(attached(SuperModel(model), {"a": tenant}))
    expected = plain_gradients(plain, tenant.weights, tenant.scale, tenant.sequences)
    for model in models:
        found = super_gradients(model, packed({"a": tenant.sequences}))["a"]
        assert found.keys() == expected.keys()
        assert all(largest_error(found[name], expected[name]) < TOLERANCE for name in found)
    assert config.to_dict() == plain.config.to_dict()
    assert config._attn_implementation == plain.config._attn_implementation


def test_biases_and_a_tied_head_are_part_of_the_base() -> None:
    """A Llama with biases everywhere and its embedding as output head; the head is no target."""
    settings = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    plain = tiny_model("llama", **settings)
    tenant = Tenant(random_adapter(plain, rank=2, seed=1), 1.0, sequences_of([9], seed=5))
    model = attached(super_model(plain), {"a": tenant})
    assert model.model.lm_head.weight is model.model.model.embed_tokens.weight
    assert not any("lm_head" in path for path in model.targets)
    found = super_logits(model, packed({"a": tenant.sequences}))["a"]
    expected = plain_logits(plain, tenant.weights, 1.0, tenant.sequences)
    assert largest_error(found, expected) < TOLERANCE


def test_linears_that_share_an_input_form_groups() -> None:
    """In a Llama: q, k and v; o; gate and up; down; in every layer."""
    groups = [[target.leaf for target in pool.targets] for pool in super_model(tiny_model()).pools]
    layer = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert groups == 2 * layer


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_attention_of_one_sequence_at_a_time_gives_the_same_logits(kind: str) -> None:
    """What `isolation: exact` uses."""
    plain = tiny_model(kind)
    batch = packed({"(nobody)": sequences_of([9, 9, 5], seed=5)})
    logits = [super_logits(super_model(plain, per_sequence=on), batch) for on in (False, True)]
    assert largest_error(logits[0]["(nobody)"], logits[1]["(nobody)"]) < TOLERANCE


def test_a_job_without_tokens_in_a_nano_batch_changes_nothing_and_gets_nothing() -> None:
    """An idle neighbour's rows stay out of the arithmetic, whatever they hold."""
    plain = tiny_model()
    tenant = Tenant(random_adapter(plain, rank=3, seed=1), 1.0, sequences_of([9], seed=5))
    batch = packed({"a": tenant.sequences})
    alone = attached(super_model(plain), {"a": tenant})
    idle = Tenant(random_adapter(plain, rank=4, seed=2), 1.0, [])
    beside = attached(super_model(plain), {"idle": idle, "a": tenant})
    for views in beside.views("idle").values():
        views.value.fill_(torch.nan)
    assert torch.equal(super_logits(alone, batch)["a"], super_logits(beside, batch)["a"])
    gradients = super_gradients(beside, batch)
    assert all(not gradient.any() for gradient in gradients["idle"].values())
    assert all(torch.isfinite(gradient).all() for gradient in gradients["a"].values())


def test_adapters_are_float32_on_a_bfloat16_base() -> None:
    """Values, gradients and moments; the base keeps its own format."""
    model = super_model(tiny_model().to(torch.bfloat16))
    model.attach("a", model.new_adapter(job_spec("a", r=2)), scale=1.0)
    super_gradients(model, packed({"a": sequences_of([9], seed=5)}))
    kinds = {tensor.dtype for views in model.views("a").values() for tensor in views}
    assert kinds == {torch.float32}
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.bfloat16}
    assert any(views.grad.any() for views in model.views("a").values())


def test_places_change_with_every_attach_and_detach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with an attach that breaks off halfway, when a pool may have grown already."""
    model = super_model(tiny_model())
    adapter = model.new_adapter(job_spec("a", r=2))
    seen = [model.places]
    model.attach("a", adapter, scale=1.0)
    seen.append(model.places)
    model.detach("a")
    seen.append(model.places)

    def no_room(weights: AdapterWeights) -> None:
        raise MemoryError

    monkeypatch.setattr(model.pools[-1], "claim", no_room)
    with pytest.raises(MemoryError):
        model.attach("b", adapter, scale=1.0)
    seen.append(model.places)
    assert len(set(seen)) == len(seen)


def test_a_hundred_adapters_run_in_one_nano_batch() -> None:
    """Each gets its own logits, among them the first and the last attached."""
    plain = tiny_model()
    model = super_model(plain, reserve_rows=8)
    tenants = {
        f"job-{number}": Tenant(
            random_adapter(plain, rank=1 + number % 7, seed=number, leaves=["q_proj", "down_proj"]),
            0.5 + number / 100,
            sequences_of([3 + number % 4], seed=number),
        )
        for number in range(100)
    }
    found = super_logits(
        attached(model, tenants), packed({job: t.sequences for job, t in tenants.items()})
    )
    for job, tenant in tenants.items():
        expected = plain_logits(plain, tenant.weights, tenant.scale, tenant.sequences)
        assert largest_error(found[job], expected) < TOLERANCE, job


def test_attach_and_detach_leave_neighbours_untouched() -> None:
    """A job's logits and weights are the same to the bit before, during and after another's stay,
    even where the pool has to grow; what was attached comes back as it was."""
    plain = tiny_model()
    tenant = Tenant(random_adapter(plain, rank=3, seed=1), 0.7, sequences_of([9, 4], seed=5))
    guest = random_adapter(plain, rank=7, seed=2, leaves=["v_proj", "up_proj"])
    model = attached(super_model(plain, reserve_rows=4), {"a": tenant})
    batch = packed({"a": tenant.sequences})
    before = super_logits(model, batch)["a"]
    model.attach("guest", guest, scale=2.0)
    during = super_logits(model, batch)["a"]
    returned = model.weights("guest")
    model.detach("guest")
    after = super_logits(model, batch)["a"]
    assert torch.equal(before, during) and torch.equal(before, after)
    for weights, original in ((returned, guest), (model.weights("a"), tenant.weights)):
        assert weights.keys() == original.keys()
        for path, pair in weights.items():
            assert torch.equal(pair.a, original[path].a) and torch.equal(pair.b, original[path].b)
    assert model.jobs == ["a"]
    model.check_integrity()


def broken_pairs() -> dict[str, AdapterWeights]:
    fitting = random_adapter(tiny_model(), rank=2, seed=1)
    path, pair = next(iter(fitting.items()))
    return {
        "no linear named model.nowhere": {"model.nowhere": pair},
        "A and B of": {path: LoraPair(a=pair.a, b=pair.b.T)},
        "are [[2, 31]": {path: LoraPair(a=pair.a[:, 1:], b=pair.b)},
        "are [[0, 32]": {path: LoraPair(a=pair.a[:0], b=pair.b[:, :0])},
    }


@pytest.mark.parametrize("message", broken_pairs())
def test_matrices_that_do_not_fit_are_refused_and_nothing_is_claimed(message: str) -> None:
    """The error names the job; the pool is as before, and the name is free."""
    model = super_model(tiny_model())
    fitting = random_adapter(tiny_model(), rank=2, seed=1)
    with pytest.raises(ValueError) as caught:
        model.attach("a", {**fitting, **broken_pairs()[message]}, scale=1.0)
    assert "job 'a'" in str(caught.value) and message in str(caught.value)
    assert model.jobs == [] and all(not pool.slots for pool in model.pools)
    model.attach("a", fitting, scale=1.0)


def test_a_name_can_be_attached_once() -> None:
    """The second time is an error that names it, and the first stays."""
    model = super_model(tiny_model())
    weights = model.new_adapter(job_spec("a"))
    model.attach("a", weights, scale=1.0)
    with pytest.raises(ValueError, match="job 'a' is attached already"):
        model.attach("a", weights, scale=1.0)
    assert model.jobs == ["a"]


def test_only_one_nano_batch_runs_at_a_time() -> None:
    """Nesting is refused, and an error inside leaves the model usable."""
    model = super_model(tiny_model())
    batch = packed({"(nobody)": sequences_of([5], seed=1)})
    nested = (model.routed(batch, train=False), model.routed(batch, train=False))
    with pytest.raises(RuntimeError, match="already running"), nested[0], nested[1]:
        pytest.fail("a second nano-batch was let in")
    assert np.isfinite(super_logits(model, batch)["(nobody)"].numpy()).all()


def test_a_dropped_model_takes_its_adapters_with_it() -> None:
    """Though transformers keeps the name of its attention for good."""
    model = super_model(tiny_model())
    model.attach("job", random_adapter(tiny_model(), rank=3, seed=1), scale=1.0)
    batch = packed({"job": sequences_of([5], seed=3)})
    super_gradients(model, batch)
    kept = [weakref.ref(pool.a.value) for pool in model.pools]
    del model, batch
    gc.collect()
    assert not any(ref() is not None for ref in kept)
