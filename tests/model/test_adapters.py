"""How an adapter starts."""

import torch
from peft import LoraConfig, get_peft_model
from support.models import job_spec, super_model, tiny_model

from tlora.model.adapters import new_pair

SIZE = {"rank": 64, "in_features": 400, "out_features": 30}


def test_a_is_uniform_within_one_over_the_root_of_in_and_b_is_zero() -> None:
    """Float32, both signs, filling its range: the variance is a third of the bound's square."""
    pair = new_pair("layer", seed=0, **SIZE)
    assert (pair.a.shape, pair.b.shape) == ((64, 400), (30, 64))
    assert pair.a.dtype == pair.b.dtype == torch.float32
    assert not pair.b.any()
    bound = 400**-0.5
    assert pair.a.abs().max() <= bound
    assert pair.a.max() > 0.999 * bound and pair.a.min() < -0.999 * bound
    # 25,600 draws: the mean's deviation is 0.0036 of the bound, the variance's 0.6 %.
    assert abs(pair.a.mean()) < 0.02 * bound
    assert abs(pair.a.var() / (bound**2 / 3) - 1) < 0.03


def test_the_start_has_the_spread_of_pefts() -> None:
    """PEFT's own Kaiming start on the same layer, compared by its extremes and its variance."""
    model = tiny_model(hidden_size=64)
    peft = get_peft_model(model, LoraConfig(r=32, target_modules=["q_proj"]))
    theirs = peft.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default")
    ours = new_pair("layer", seed=0, rank=32, in_features=64, out_features=64).a
    assert abs(theirs.weight.abs().max() / ours.abs().max() - 1) < 0.01
    assert abs(theirs.weight.var() / ours.var() - 1) < 0.1


def test_the_start_is_keyed_by_seed_and_module() -> None:
    """The same twice; another for another seed or another module."""
    first = new_pair("layers.0.q", seed=3, **SIZE).a
    assert torch.equal(first, new_pair("layers.0.q", seed=3, **SIZE).a)
    assert not torch.equal(first, new_pair("layers.0.q", seed=4, **SIZE).a)
    assert not torch.equal(first, new_pair("layers.1.q", seed=3, **SIZE).a)


def test_the_start_does_not_depend_on_the_jobs_other_targets() -> None:
    """A job that adapts one name starts there as one that adapts all."""
    model = super_model(tiny_model())
    everything = model.new_adapter(job_spec(seed=5))
    some = model.new_adapter(job_spec("b", seed=5, targets=("down_proj",)))
    assert len(everything) == 14 and len(some) == 2
    assert all(torch.equal(pair.a, everything[path].a) for path, pair in some.items())
