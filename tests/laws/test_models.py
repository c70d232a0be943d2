"""The law of isolation on every supported architecture.

Three jobs that differ in rank, targets, batch size, dropout and the lengths of their rows are
trained together, alone and with PEFT; the trained adapter is exported and loaded by PEFT. A case is
a family of models or a setting that changes how it computes: biases, tied heads, few key heads,
windows, kinds of rotary embeddings, experts.
"""

import copy
import functools
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from support.curves import Curve, Watcher, difference, linear_numbers, random_rows, train_with_peft
from support.models import (
    GROUPED,
    SUPPORTED,
    VOCABULARY,
    WINDOW,
    largest_error,
    packed,
    sequences_of,
    super_logits,
    super_model,
    tiny_model,
)
from support.runs import quiet_single_thread
from transformers.modeling_utils import PreTrainedModel

from tlora.core.errors import ModelError
from tlora.core.job import DataSpec, JobSpec, LoraSpec, TrainSpec
from tlora.model import rope
from tlora.model import super_model as super_model_module
from tlora.model.peft_format import export_adapter
from tlora.model.super_model import SuperModel
from tlora.training import launching
from tlora.training.driver import JobDriver
from tlora.training.engine import Engine
from tlora.training.loop import run_jobs

STEPS = 8

# Relative, after 8 steps in float32. Measured over all cases: at most 2.0e-7 in the losses, 1.0e-6
# in the gradient norms and 2.4e-5 in the adapters, of linears with next to no gradient. A scale off
# by 1 % gives at least 9e-6, 1e-2 and 8e-4.
ROUNDING = 5e-6
ADAPTER_ROUNDING = 2e-4
# Of the largest logit. Measured: at most 1.7e-6; a scale off by 1 % gives at least 3.5e-4.
LOGITS = 1e-5


@dataclass(frozen=True)
class Case:
    kind: str
    settings: dict[str, object] = field(default_factory=dict)

    def model(self) -> PreTrainedModel:
        return tiny_model(self.kind, **self.settings)


def rope_case(rope_type: str, *, kind: str = "llama", **parameters: object) -> Case:
    parameters = {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}
    return Case(kind, {"rope_parameters": parameters, "max_position_embeddings": 64})


EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
LONG_ROPE = {
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}
"""Frequencies change at 16 tokens, in the middle of the rows' lengths."""

FAMILIES = {kind: Case(kind) for kind in SUPPORTED}
MORE_FAMILIES = {
    "starcoder2": Case("starcoder2", {"num_key_value_heads": 2, "sliding_window": WINDOW}),
    "stablelm": Case("stablelm", {"num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    "olmo": Case("olmo", {"num_key_value_heads": 2, "clip_qkv": 1.0}),
    "olmo2": Case("olmo2", {"num_key_value_heads": 2}),
    "olmo3": Case("olmo3", {"num_key_value_heads": 2, "sliding_window": WINDOW}),
    "cohere": Case("cohere", {"num_key_value_heads": 2, "logit_scale": 0.25}),
    "cohere2": Case("cohere2", {"num_key_value_heads": 2, "sliding_window": WINDOW}),
    "granite": Case("granite", {"num_key_value_heads": 2, "residual_multiplier": 0.7}),
    "smollm3": Case("smollm3", {"num_key_value_heads": 2, "no_rope_layers": [1, 0]}),
    "glm4": Case("glm4", GROUPED),
    "ministral3": Case("ministral3", GROUPED),
    "exaone4": Case("exaone4", {**GROUPED, "sliding_window": WINDOW}),
    "nemotron": Case("nemotron", GROUPED),
    "apertus": Case("apertus", {"num_key_value_heads": 2}),
    "arcee": Case("arcee", GROUPED),
    "glm": Case("glm", GROUPED),
    "helium": Case("helium", GROUPED),
    "seed_oss": Case("seed_oss", GROUPED),
    "ernie4_5": Case("ernie4_5", GROUPED),
    "hunyuan_v1_dense": Case("hunyuan_v1_dense", GROUPED),
    "gpt_bigcode": Case("gpt_bigcode", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48}),
}
MIXTURES = {
    "mixtral": Case("mixtral", {**GROUPED, **EXPERTS}),
    "qwen2_moe": Case(
        "qwen2_moe",
        {"num_key_value_heads": 2, **EXPERTS, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_moe": Case("qwen3_moe", {**GROUPED, **EXPERTS}),
    "olmoe": Case("olmoe", EXPERTS),
    "granitemoe": Case("granitemoe", {"num_key_value_heads": 2, **EXPERTS}),
    "phimoe": Case("phimoe", {"num_key_value_heads": 2, **EXPERTS}),
    "gpt_oss": Case("gpt_oss", {**GROUPED, **EXPERTS, "sliding_window": WINDOW}),
}
SETTINGS = {
    "tied head and biases": Case(
        "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "untied head": Case("gemma", {"tie_word_embeddings": False}),
    "one key head": Case("llama", {"num_key_value_heads": 1}),
    "as many key heads": Case("qwen3", {"num_key_value_heads": 4}),
    "window of one layer": Case(
        "qwen2",
        {
            "sliding_window": WINDOW,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "linear rope": rope_case("linear", factor=2.0),
    "dynamic rope": rope_case("dynamic", factor=4.0),
    "yarn rope": rope_case("yarn", factor=4.0, original_max_position_embeddings=16),
    "llama3 rope": rope_case(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "long rope": rope_case("longrope", kind="phi3", **LONG_ROPE),
    "long rope of another family": rope_case("longrope", **LONG_ROPE),
    "partial rope": rope_case("default", kind="phi", partial_rotary_factor=0.5),
}
# A Phi 3 keeps the limit beside the other parameters.
SETTINGS["long rope"].settings["original_max_position_embeddings"] = 16
# Beyond max_position_embeddings is where the dynamic kind does anything.
SETTINGS["dynamic rope"].settings["max_position_embeddings"] = 16
CASES = {**FAMILIES, **MORE_FAMILIES, **MIXTURES, **SETTINGS}
LARGE_TABLES = {"max_position_embeddings": 256}
BY_LENGTH = ("dynamic rope", "long rope", "long rope of another family")


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    yield from quiet_single_thread()


def jobs_for(model: SuperModel) -> list[JobSpec]:
    """On everything with a large enough side; on the first and last linears; on one layer."""
    wide = [t for t in model.targets.values() if min(t.in_features, t.out_features) >= 8]
    leaves = list(dict.fromkeys(target.leaf for target in wide))

    def job(name: str, seed: int, lora: dict, train: dict) -> JobSpec:
        return JobSpec(
            name=name,
            data=DataSpec(path="in memory"),
            lora=LoraSpec(lora_alpha=2.0 * lora["r"], **lora),
            train=TrainSpec(
                max_steps=STEPS, seed=seed, learning_rate=2e-3, adam_epsilon=1e-4, **train
            ),
        )

    return [
        job("all", 1, {"r": 4, "target_modules": tuple(leaves)}, {"batch_size": 3}),
        job("few", 2, {"r": 1, "target_modules": (leaves[0], leaves[-1])}, {"batch_size": 1}),
        job(
            "dropped",
            3,
            {"r": 8, "lora_dropout": 0.2, "target_modules": (leaves[0],)},
            {"batch_size": 5},
        ),
    ]


ROWS = {
    "all": random_rows(1, 20, VOCABULARY, longest=36),
    "few": random_rows(2, 20, VOCABULARY, longest=14),
    "dropped": random_rows(3, 20, VOCABULARY, longest=26),
}


def train_together(model: SuperModel, names: list[str], *, budget: int) -> dict[str, Curve]:
    engine = Engine(model, budget_tokens=budget, bucket_step=32)
    watcher = Watcher(engine)
    drivers = []
    for spec in jobs_for(model):
        if spec.name in names:
            drivers.append(JobDriver(spec, ROWS[spec.name]))
            drivers[-1].attach(engine, model.new_adapter(spec))
    run_jobs(engine, drivers, watcher)
    assert not watcher.failed, watcher.failed
    assert not model.jobs
    return watcher.curves


class Trained:
    """A case's curves, each made when first asked for."""

    def __init__(self, case: Case) -> None:
        self.base = case.model()
        self.model = super_model(self.base, reserve_rows=8)
        self.specs = {spec.name: spec for spec in jobs_for(self.model)}

    @functools.cached_property
    def together(self) -> dict[str, Curve]:
        return train_together(self.model, list(ROWS), budget=160)

    @functools.cached_property
    def alone(self) -> dict[str, Curve]:
        """Under another budget, so that batches are cut differently too."""
        return {name: train_together(self.model, [name], budget=96)[name] for name in ROWS}

    def with_peft(self, name: str) -> Curve:
        base = copy.deepcopy(self.base)
        by_length = any(rope.rope_kinds(m) & {"dynamic", "longrope"} for m in base.modules())
        forget_lengths_between_rows(base)
        return train_with_peft(
            base,
            self.specs[name],
            ROWS[name],
            self.model.new_adapter(self.specs[name]),
            linear_numbers(self.model),
            # Where frequencies depend on the longest row of a padded batch, one row at a time.
            chunk=1 if by_length else 4,
        )


def forget_lengths_between_rows(model: PreTrainedModel) -> None:
    """The dynamic kind remembers the longest row: here every row meets a fresh model."""
    for module in model.modules():
        if "dynamic" in rope.rope_kinds(module):
            module.register_forward_pre_hook(lambda rotary, _: rope.forget_lengths(rotary))


@functools.cache
def trained(name: str) -> Trained:
    return Trained(CASES[name])


def same(one: Curve, other: Curve) -> bool:
    found = difference(one, other)
    steps = found.loss <= ROUNDING and found.grad_norm <= ROUNDING
    return steps and found.adapter <= ADAPTER_ROUNDING


@pytest.mark.parametrize("case", CASES)
def test_jobs_in_company_train_as_alone_and_as_with_peft(case: str) -> None:
    """Losses, gradient norms and adapters of all jobs, to float32 rounding; with PEFT those without
    dropout."""
    found = trained(case)
    for name, together in found.together.items():
        assert len(together.losses) == STEPS
        assert same(together, found.alone[name]), name
        if not found.specs[name].lora.lora_dropout:
            assert same(together, found.with_peft(name)), name


@pytest.mark.parametrize("case", CASES)
def test_an_exported_adapter_gives_the_same_logits_in_peft(case: str, tmp_path: Path) -> None:
    """Of the trained job that adapts most, on a row longer than every window and limit; with its
    scale off by 1 % it does not."""
    found = trained(case)
    spec, weights = found.specs["all"], found.together["all"].adapter
    export_adapter(
        tmp_path / "out", weights, spec.lora, base_model="org/base", targets=found.model.targets
    )
    peft = PeftModel.from_pretrained(copy.deepcopy(found.base), str(tmp_path / "out")).eval()
    [row] = sequences_of([33], seed=5)
    ids = torch.from_numpy(row.input_ids.astype("int64"))[None]
    with torch.no_grad():
        theirs = peft(input_ids=ids).logits[0, :-1]

    def ours(scale: float) -> torch.Tensor:
        found.model.attach("all", weights, scale=scale)
        try:
            # Beside a short row, which must not matter.
            beside = packed({"all": [row], "(nobody)": sequences_of([5], seed=6)})
            return super_logits(found.model, beside)["all"]
        finally:
            found.model.detach("all")

    assert largest_error(ours(spec.lora.scale), theirs) < LOGITS
    assert largest_error(ours(1.01 * spec.lora.scale), theirs) > LOGITS


def refused(curves: dict[str, Curve], found: Trained, name: str) -> bool:
    return not same(curves[name], found.alone[name])


@pytest.mark.parametrize("case", ["llama", "gpt2", "phi3", "mixtral", "long rope"])
def test_a_scale_off_by_one_per_cent_is_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one job, in company only; its neighbours are as alone."""
    found = trained(case)
    expected = found.alone
    attach = SuperModel.attach

    def off(self, name, weights, *, scale, **settings):
        factor = 1.01 if name == "few" else 1.0
        attach(self, name, weights, scale=factor * scale, **settings)

    monkeypatch.setattr(SuperModel, "attach", off)
    curves = train_together(found.model, list(expected), budget=160)
    assert [name for name in curves if refused(curves, found, name)] == ["few"]


@pytest.mark.parametrize("case", ["gpt2", "opt", "long rope"])
def test_positions_counted_over_the_packed_row_are_refused(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where positions are learned, or lengths choose frequencies; the tables are large enough."""
    found = Trained(Case(CASES[case].kind, {**CASES[case].settings, **LARGE_TABLES}))
    pack = launching.pack

    def counting_on(*arguments):
        batch = pack(*arguments)
        return replace(batch, position_ids=torch.arange(batch.num_rows)[None])

    assert found.alone
    monkeypatch.setattr(launching, "pack", counting_on)
    curves = train_together(found.model, list(ROWS), budget=160)
    assert any(refused(curves, found, name) for name in curves)


@pytest.mark.parametrize("case", BY_LENGTH)
def test_frequencies_chosen_by_the_longest_neighbour_are_refused(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the probe when the model is loaded; and by the law, where the probe is left out."""
    found = trained(case)
    monkeypatch.setattr(super_model_module, "separate_sequences", lambda model, routing: None)
    with pytest.raises(ModelError, match="gives other logits for packed sequences"):
        super_model(found.base)
    monkeypatch.setattr(super_model_module, "check_packing", lambda *others: None)
    curves = train_together(super_model(found.base), list(ROWS), budget=160)
    assert refused(curves, found, "few")


@pytest.mark.parametrize("case", MIXTURES)
def test_experts_cannot_be_trained_to_the_bit(case: str) -> None:
    """Their sums depend on how many tokens reach them: isolation: exact is refused by name."""
    base = trained(case).base
    with pytest.raises(ModelError, match=f"{type(base).__name__} has experts.*isolation: exact"):
        super_model(base, per_sequence=True)
