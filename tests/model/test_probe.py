"""Which models are trusted: by what they compute, with a reason where they are not."""

import copy

import pytest
import torch
from support.models import GPT2, GROUPED, SUPPORTED, job_spec, super_model, tiny_model

from tlora.core.errors import ModelError, SpecError
from tlora.kernels.attention.layout import attention_layout
from tlora.kernels.attention.packed import packed_attention
from tlora.model.probe import PROBE_WINDOW, find_groups, has_experts, short_windows
from tlora.model.rope import length_limit
from tlora.model.routing import Routing
from tlora.model.super_model import SuperModel
from tlora.model.targets import find_targets

OWN_CODE = "computes attention with code of its own"
REFUSED = {
    "bloom": ({"n_layer": 2, "n_head": 4}, OWN_CODE),
    "falcon": ({}, OWN_CODE),
    "gptj": ({**GPT2, "rotary_dim": 4}, OWN_CODE),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}, OWN_CODE),
    "mamba": ({}, "linear_attention"),
    "llama4_text": ({**GROUPED, "intermediate_size_mlp": 48}, "chunked_attention"),
    "bert": ({}, "gives other logits for packed sequences"),
    "doge": (GROUPED, "does not run on packed rows"),
    "whisper": (
        {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 48, "decoder_attention_heads": 4},
        "logits of chosen rows",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_packed_is_refused_by_name_with_its_reason(kind: str) -> None:
    """Recurrence, ALiBi, chunks, no causality, no row choice: a ModelError, nothing raw."""
    settings, reason = REFUSED[kind]
    model = tiny_model(kind, **settings)
    with pytest.raises(ModelError) as caught:
        SuperModel(model)
    message = str(caught.value)
    assert message.startswith("base.model: ") and reason in message
    assert type(model).__name__ in message or kind in message


@pytest.mark.parametrize("kind", SUPPORTED)
def test_a_supported_model_is_accepted_in_bfloat16_too(kind: str) -> None:
    """The probe's tolerance is wide enough for the rounding of the format."""
    assert super_model(tiny_model(kind).to(torch.bfloat16)).targets


def test_attention_that_ignores_boundaries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal over the whole packed row: each sequence sees those before it."""

    def leaking(self, module, query, key, value, attention_mask, scaling=None, **others):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        layout = attention_layout([len(q)], len(q), 1)
        return packed_attention(q, k, v, layout, scale=scaling)[None], None

    monkeypatch.setattr(Routing, "attention", leaking)
    with pytest.raises(ModelError, match="LlamaForCausalLM gives other logits for packed"):
        super_model(tiny_model())


def test_a_leak_below_the_tolerance_is_refused_by_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A millionth of the row's mean added everywhere: equal within rounding, but not isolated."""
    honest = Routing.attention

    def leaking(self, module, query, *others, **settings):
        out, _ = honest(self, module, query, *others, **settings)
        return out + 1e-6 * query.mean(), None

    monkeypatch.setattr(Routing, "attention", leaking)
    with pytest.raises(ModelError, match="changes the logits of its neighbour"):
        super_model(tiny_model())


EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_held_to_rounding(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Their sums move with their company; a leak of a thousandth is refused all the same."""
    model = tiny_model("qwen3_moe", **EXPERTS).to(dtype)
    assert has_experts(model) and not has_experts(tiny_model())
    assert {target.leaf for target in super_model(model).targets.values()} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    honest = Routing.attention

    def leaking(self, module, query, *others, **settings):
        out, _ = honest(self, module, query, *others, **settings)
        return out + 1e-3 * query.mean(), None

    monkeypatch.setattr(Routing, "attention", leaking)
    with pytest.raises(ModelError, match=r"gives other logits|changes the logits"):
        super_model(model)


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "dynamic"), ("llama", "longrope"), ("phi3", "longrope")]
)
def test_ropes_are_as_before_after_the_probe(family: str, kind: str) -> None:
    """Limits, frequencies and what they remember."""
    parameters = {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    model = tiny_model(family, rope_parameters=parameters)
    rope = model.model.rotary_emb
    before = (copy.deepcopy(model.config.to_dict()), rope.inv_freq.clone(), length_limit(rope))
    taken_over = super_model(model).model.model.rotary_emb.rope
    for after in (rope, taken_over):
        assert torch.equal(after.inv_freq, before[1]) and length_limit(after) == before[2]
        assert after.max_seq_len_cached == after.original_max_seq_len == 64
    assert model.config.to_dict() == before[0]


def test_a_rope_of_an_unknown_kind_is_refused_by_name() -> None:
    """It might look at the length of the row."""
    model = tiny_model()
    model.model.rotary_emb.rope_type = "spiral"
    with pytest.raises(ModelError, match="LlamaForCausalLM has rotary embeddings of type spiral"):
        super_model(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_scores_off_by_one_per_cent_are_refused(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """In bfloat16 too, where rounding is larger than that: the probe is computed in float32 as
    well."""
    honest = Routing.attention

    def off(self, *arguments, scaling=None, **settings):
        return honest(self, *arguments, scaling=1.01 * scaling, **settings)

    monkeypatch.setattr(Routing, "attention", off)
    with pytest.raises(ModelError, match="gives other logits for packed"):
        super_model(tiny_model().to(dtype))


@pytest.mark.parametrize("window", [PROBE_WINDOW + 1, 4096])
def test_a_window_that_gets_lost_is_refused_however_long_it_is(
    monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """The probe's sequences are short, so it shortens the windows."""
    honest = Routing.attention

    def windowless(self, *arguments, sliding_window=None, **settings):
        return honest(self, *arguments, **settings)

    model = tiny_model("mistral", sliding_window=window)
    super_model(model)
    monkeypatch.setattr(Routing, "attention", windowless)
    with pytest.raises(ModelError, match="gives other logits for packed"):
        super_model(model)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3_text", "phi3"])
def test_windows_are_as_before_after_the_probe(kind: str) -> None:
    """In the configuration and in every module, also if the model fails inside."""
    model = tiny_model(kind, sliding_window=40)

    def windows(of) -> list[object]:
        return [getattr(owner, "sliding_window", None) for owner in (of.config, *of.modules())]

    before = windows(model)
    assert 40 in before
    with pytest.raises(ZeroDivisionError), short_windows(model):
        assert PROBE_WINDOW in windows(model) and 40 not in windows(model)
        raise ZeroDivisionError
    assert windows(model) == before
    taken_over = super_model(model).model
    assert taken_over.config.sliding_window == 40
    assert [w for w in windows(taken_over) if w] == [w for w in before if w]


def test_a_soft_cap_that_gets_lost_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a lost window is."""
    honest = Routing.attention

    def uncapped(self, *arguments, softcap=None, **settings):
        return honest(self, *arguments, **settings)

    monkeypatch.setattr(Routing, "attention", uncapped)
    with pytest.raises(ModelError, match="gives other logits for packed"):
        super_model(tiny_model("gemma2"))


def test_sinks_that_get_lost_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a soft-cap is."""
    honest = Routing.attention

    def without(self, *arguments, s_aux=None, **settings):
        return honest(self, *arguments, **settings)

    model = tiny_model("gpt_oss", **GROUPED, num_local_experts=4)
    super_model(model)
    monkeypatch.setattr(Routing, "attention", without)
    with pytest.raises(ModelError, match="gives other logits for packed"):
        super_model(model)


def test_a_model_that_yields_nan_is_refused() -> None:
    """No comparison holds for it."""
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(ModelError, match="gives other logits"):
        SuperModel(model)


def test_running_out_of_memory_is_not_the_models_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed on as it is, not as a refusal."""
    model = tiny_model()

    def exhausted(*arguments, **settings):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(model, "forward", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        SuperModel(model)


def test_a_linear_that_runs_twice_or_never_is_left_out() -> None:
    """Its place in a group would not be clear; the rest of the model goes on."""
    model = tiny_model()
    model.model.layers[1].self_attn.q_proj = model.model.layers[0].self_attn.q_proj
    model.unused = torch.nn.Linear(32, 32)
    groups, left_out = find_groups(model, find_targets(model))
    paths = {path for group in groups for path in group}
    assert "runs 2 times" in left_out["model.layers.0.self_attn.q_proj"] and len(left_out) == 1
    assert "unused" not in paths and "model.layers.0.self_attn.q_proj" not in paths
    assert "model.layers.0.self_attn.k_proj" in paths
    assert "unused" not in super_model(model).targets


def test_a_linear_of_the_output_head_is_left_out() -> None:
    """It sees only the rows whose logits are asked for, which are not the nano-batch's."""
    model = super_model(tiny_model("bert", is_decoder=True))
    assert len(model.targets) == 12
    assert all(path.startswith("bert.encoder") for path in model.targets)


@pytest.mark.parametrize("names", ["all-linear", "dense", r".*\.dense", ("query", "dense")])
def test_a_job_that_asks_for_a_linear_that_is_left_out_is_refused(names) -> None:
    """PEFT would train it too: the job would silently be another one."""
    model = super_model(tiny_model("bert", is_decoder=True))
    with pytest.raises(SpecError, match=r"cls\.predictions\.transform\.dense does not see every"):
        model.new_adapter(job_spec(targets=names))
    assert len(model.new_adapter(job_spec(targets=("query", "value")))) == 4


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_pattern_that_reaches_the_output_head_is_refused(kind: str) -> None:
    """PEFT would train it, tied or not. By all-linear it means all others."""
    model = super_model(tiny_model(kind))
    with pytest.raises(SpecError, match=r"lm_head is the output head .* such as q_proj"):
        model.new_adapter(job_spec(targets=r".*(q_proj|lm_head)"))
    assert len(model.new_adapter(job_spec(targets="all-linear"))) == 14
    assert len(model.new_adapter(job_spec(targets=r".*(q_proj|v_proj)"))) == 4


def test_a_model_without_linears_is_refused() -> None:
    """There is nothing to adapt."""
    model = tiny_model()
    model.get_output_embeddings = lambda: None
    bare = copy.deepcopy(model)
    bare.model.layers = torch.nn.ModuleList()
    bare.lm_head = torch.nn.Embedding(1, 1)
    bare.lm_head.forward = lambda hidden: hidden
    with pytest.raises(ModelError, match="LlamaForCausalLM has no linear that can carry"):
        SuperModel(bare)
