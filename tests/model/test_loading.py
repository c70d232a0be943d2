"""Base models from disk: loaded whole, or refused in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import save_base, tiny_model
from transformers import AutoConfig
from transformers.modeling_utils import PreTrainedModel

from tlora.core.errors import ModelError
from tlora.core.job import BaseSpec
from tlora.model import loading
from tlora.model.loading import (
    context_length,
    load_base,
    load_config,
    load_shape,
    load_tokenizer,
    resolve_device,
)
from tlora.model.quantised_linear import QuantisedLinear
from tlora.model.targets import find_targets

CPU = torch.device("cpu")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return save_base(tmp_path / "base", tie_word_embeddings=True)


def spec(path: Path | str, **settings) -> BaseSpec:
    return BaseSpec(model=str(path), **settings)


@pytest.mark.parametrize(("device", "own"), [("cuda:1", ["cuda:1"]), ("cuda", []), ("cpu", [])])
def test_kernels_are_launched_where_the_weights_go(
    base: Path, monkeypatch: pytest.MonkeyPatch, device: str, own: list[str]
) -> None:
    """By this thread, from here on: Triton does not ask where tensors are."""
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    monkeypatch.setattr(PreTrainedModel, "to", lambda model, device: model)
    load_base(spec(base), torch.device(device))
    assert chosen == own


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_weights_come_in_the_number_format_asked_for(base: Path, dtype: str) -> None:
    """`auto` takes what the checkpoint says; tied weights are not missing ones."""
    model = load_base(spec(base, dtype=dtype), CPU)
    expected = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    stored = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.get_input_embeddings().weight, stored.to(expected))


def test_the_shape_alone_has_the_targets_of_the_model_and_no_weights(base: Path) -> None:
    """`check` needs no more."""
    (base / "model.safetensors").unlink()
    shape = load_shape(spec(base))
    assert find_targets(shape) == find_targets(tiny_model())
    assert {parameter.device.type for parameter in shape.parameters()} == {"meta"}


def change_config(**values: object) -> Callable[[Path], None]:
    def change(base: Path) -> None:
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps({**config, **values}))

    return change


def change_weight(name: str, tensor: torch.Tensor | None) -> Callable[[Path], None]:
    def change(base: Path) -> None:
        tensors = load_file(base / "model.safetensors")
        del tensors[name]
        if tensor is not None:
            tensors[name] = tensor
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})

    return change


def cut_weights(base: Path) -> None:
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def pickle_weights(base: Path) -> None:
    (base / "model.safetensors").unlink()
    torch.save({}, base / "pytorch_model.bin")


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a weight missing": (change_weight(Q_PROJ, None), f"first is {Q_PROJ}"),
    "a weight of another shape": (change_weight(Q_PROJ, torch.ones(32, 8)), f"first is {Q_PROJ}"),
    "weights cut short": (cut_weights, "cannot be loaded"),
    "weights that run code": (pickle_weights, "no file named model.safetensors"),
    "no weights": (lambda base: (base / "model.safetensors").unlink(), "model.safetensors"),
    "a config that is no JSON": (lambda base: (base / "config.json").write_text("{"), "valid JSON"),
    "no config": (lambda base: (base / "config.json").unlink(), "holds no config.json"),
    "an unknown kind": (change_config(model_type="nonesuch"), "`nonesuch`"),
    "code of its own": (
        change_config(model_type="own", auto_map={"AutoConfig": "x.Y"}),
        "contains custom code",
    ),
    "an encoder-decoder": (change_config(model_type="t5"), "T5Config"),
    "a value of another type": (change_config(num_attention_heads="x"), "num_attention_heads"),
    "a value that cannot be": (change_config(num_attention_heads=0), "cannot be loaded"),
    "linear attention": (
        change_config(layer_types=["linear_attention", "full_attention"]),
        "linear_attention",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_one_line(base: Path, damage: str) -> None:
    """A ModelError that names the field and the trouble; nothing is filled in at random."""
    break_it, trouble = DAMAGES[damage]
    break_it(base)
    with pytest.raises(ModelError) as caught:
        load_base(spec(base), CPU)
    message = str(caught.value)
    assert message.startswith("base.model: ") and trouble in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("held", "method"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
    ],
)
@pytest.mark.parametrize("load", [load_shape, lambda asked: load_base(asked, CPU)])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_weights_in_fewer_bits_already_are_refused(
    base: Path, held: dict[str, object], method: str, load, quantization: str
) -> None:
    """Before anything is read, and whether the library that could read them is there or not: a
    person is not sent to install it."""
    change_config(quantization_config=held)(base)
    with pytest.raises(
        ModelError, match=rf"quantised already \({method}\); name the checkpoint in"
    ):
        load(spec(base, quantization=quantization))


def test_weights_that_are_unpacked_as_they_are_read_may_be_quantised(base: Path) -> None:
    """Those in MXFP4 or FP8 on a machine that cannot multiply them."""
    change_config(quantization_config={"quant_method": "mxfp4"})(base)
    model = load_base(spec(base, quantization="nf4"), CPU)
    assert isinstance(model.get_submodule(Q_PROJ.removesuffix(".weight")), QuantisedLinear)


def test_weights_that_are_left_in_fewer_bits_are_not_quantised(base: Path, monkeypatch) -> None:
    """As those in FP8 on Hopper: their scales would be lost."""
    honest = loading.AutoModelForCausalLM.from_pretrained

    def left(*arguments, **settings):
        model, report = honest(*arguments, **settings)
        model.hf_quantizer = SimpleNamespace(
            quantization_config=SimpleNamespace(quant_method="fp8")
        )
        return model, report

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", left)
    with pytest.raises(ModelError, match=r"quantised already \(fp8\)"):
        load_base(spec(base, quantization="nf4"), CPU)
    assert load_base(spec(base), CPU) is not None


def test_the_context_is_known_under_every_models_name_for_it() -> None:
    """GPT-2 calls it n_positions; where there are images too, the text has a part of its own."""
    assert context_length(tiny_model().config) == 64
    assert context_length(tiny_model("gpt2", max_position_embeddings=64).config) == 64
    assert context_length(AutoConfig.for_model("xlnet")) is None
    text = {"max_position_embeddings": 64}
    assert context_length(AutoConfig.for_model("gemma3", text_config=text)) == 64


@pytest.mark.parametrize("kind", ["musicgen", "musicgen_melody", "t5", "clip"])
def test_what_is_not_one_causal_model_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    """Some are asked for values that only their parts have, an AttributeError; of others all
    classes that there are would be listed."""
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"base.model: the {kind} in .* cannot be made") as caught:
        load_shape(spec(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"hidden_size": "32"}, "'hidden_size': TypeError: Field 'hidden_size' expected int"),
        ({"layer_types": ["full_attention"]}, "must be equal to the number of `layer_types`"),
        ({"hidden_act": "nope"}, "'nope' is not known"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_with_the_reason(
    base: Path, values: dict[str, object], reason: str
) -> None:
    """In one line, of which a heading such as "Validation error:" is not all."""
    change_config(**values)(base)
    with pytest.raises(ModelError, match=reason) as caught:
        load_shape(spec(base))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["org/absent", "absent", "a/b/c"])
def test_a_name_that_is_neither_here_nor_to_be_had_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a network, at once."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=f"base.model: '{name}' is neither a directory here nor"):
        load_config(spec(name))


def test_a_checkpoint_without_a_tokenizer_is_told_from_one_without_a_model(base: Path) -> None:
    """The message says which is missing."""
    assert len(load_tokenizer(spec(base))) == 259
    for file in base.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"base\.model: the tokenizer in .* cannot be loaded"):
        load_tokenizer(spec(base))


def test_a_device_is_checked_by_name_and_presence(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` falls back to the CPU; CUDA is refused where there is none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ModelError, match=r"engine\.device: 'gpu' is not a device"):
        resolve_device("gpu")
    with pytest.raises(ModelError, match=r"engine\.device: cuda was asked for"):
        resolve_device("cuda:1")
