"""Which linears a job adapts, and what is said when it asks for what is not there."""

import pytest
from support.models import job_spec, tiny_model

from tlora.core.errors import SpecError
from tlora.model.targets import choose_targets, find_targets

LEAVES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def targets():
    return find_targets(tiny_model())


def chosen(targets, wanted) -> list[str]:
    return [target.path for target in choose_targets(job_spec(targets=wanted), targets)]


def test_all_linear_is_every_linear_but_the_output_head(targets) -> None:
    """In the order of the modules."""
    paths = chosen(targets, "all-linear")
    assert [path.rpartition(".")[2] for path in paths] == 2 * LEAVES
    assert not any("lm_head" in path for path in paths)


def test_a_conv1d_counts_as_a_linear_with_its_sizes_turned() -> None:
    """GPT-2 keeps [in, out]."""
    found = find_targets(tiny_model("gpt2"))
    mlp = found["transformer.h.0.mlp.c_fc"]
    assert (mlp.in_features, mlp.out_features, mlp.transposed) == (32, 48, True)
    assert len(found) == 8


def test_leaf_names_reach_every_layer(targets) -> None:
    """In the model's order, whatever the list's; a name twice is a name once."""
    paths = chosen(targets, ("v_proj", "q_proj", "v_proj"))
    assert paths == [f"model.layers.{i}.self_attn.{leaf}_proj" for i in (0, 1) for leaf in "qv"]


def test_a_name_may_be_a_path_or_the_end_of_one(targets) -> None:
    """Cut at dots only: `proj` is the end of no path."""
    assert chosen(targets, ("layers.1.mlp.up_proj",)) == ["model.layers.1.mlp.up_proj"]
    assert chosen(targets, ("model.layers.0.mlp.up_proj",)) == ["model.layers.0.mlp.up_proj"]
    with pytest.raises(SpecError, match="'proj' reaches no linear"):
        chosen(targets, ("proj",))


def test_a_string_is_a_regular_expression_over_whole_paths(targets) -> None:
    """As in PEFT: it must match from the first to the last letter."""
    assert chosen(targets, r".*\.1\..*(q|k)_proj") == [
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.k_proj",
    ]
    with pytest.raises(SpecError, match="reaches no linear"):
        chosen(targets, r"layers\.1\.mlp")


def test_a_leaf_name_without_brackets_is_understood(targets) -> None:
    """`target_modules: q_proj` is what people write."""
    assert len(chosen(targets, "q_proj")) == 2


@pytest.mark.parametrize("wanted", [("q_proj", "query"), "query", "lm_head"])
def test_a_name_that_reaches_nothing_is_an_error_that_says_what_there_is(targets, wanted) -> None:
    """Job, field, the name, and the model's own names; one unreachable name of a list suffices."""
    with pytest.raises(SpecError) as caught:
        chosen(targets, wanted)
    error = caught.value
    assert (error.job, error.field) == ("a", "lora.target_modules")
    name = wanted if isinstance(wanted, str) else "query"
    assert f"'{name}' reaches no linear" in str(error) and ", ".join(LEAVES) in str(error)


def test_a_broken_expression_is_an_error_with_its_reason(targets) -> None:
    """Named like any other wrong field."""
    with pytest.raises(SpecError, match=r"lora\.target_modules: '\(q' is not a regular exp"):
        chosen(targets, "(q")


def test_a_rank_no_layer_could_use_is_an_error_that_says_the_largest(targets) -> None:
    """The smallest layer decides: k_proj of 32 -> 16 takes up to 16."""
    assert len(choose_targets(job_spec(r=16), targets)) == 14
    with pytest.raises(SpecError) as caught:
        choose_targets(job_spec(r=17), targets)
    assert (caught.value.job, caught.value.field) == ("a", "lora.r")
    assert "k_proj (32 -> 16); use at most 16" in str(caught.value)
    assert choose_targets(job_spec(r=32, targets=("down_proj",)), targets)
