"""Adapter directories: what others load from ours, and what we accept from others."""

import copy
import json
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.models import (
    job_spec,
    largest_error,
    packed,
    random_adapter,
    sequences_of,
    super_logits,
    super_model,
    tiny_model,
)

from tlora.core.errors import AdapterError
from tlora.core.job import JobSpec
from tlora.model.adapters import AdapterWeights
from tlora.model.peft_format import (
    CONFIG,
    WEIGHTS,
    export_adapter,
    read_adapter,
    serving_commands,
)
from tlora.model.targets import choose_targets, find_targets

# As in test_super_model.py: measured noise up to 1e-6 of the largest logit.
TOLERANCE = 1e-5
LAYER_1 = r".*\.1\..*"


def adapter_for(model, job: JobSpec) -> AdapterWeights:
    """Random on the job's targets, in both matrices."""
    wanted = {target.path for target in choose_targets(job, find_targets(model))}
    every = random_adapter(model, rank=job.lora.r, seed=3)
    return {path: pair for path, pair in every.items() if path in wanted}


def export(directory: Path, model, job: JobSpec, weights: AdapterWeights | None = None) -> Path:
    export_adapter(
        directory,
        adapter_for(model, job) if weights is None else weights,
        job.lora,
        base_model="org/base",
        targets=find_targets(model),
    )
    return directory


def config_of(directory: Path) -> dict[str, object]:
    return json.loads((directory / CONFIG).read_text())


def peft_error(directory: Path, model, job: JobSpec, weights: AdapterWeights) -> float:
    """How far the logits through PEFT's loader are from the super-model's."""
    fused = super_model(model)
    fused.attach(job.name, weights, scale=job.lora.scale)
    [sequence] = sequences_of([17], seed=5)
    expected = super_logits(fused, packed({job.name: [sequence]}))[job.name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = PeftModel.from_pretrained(copy.deepcopy(model), str(directory)).eval()
    with torch.no_grad():
        ids = torch.from_numpy(sequence.input_ids.astype("int64"))[None]
        return largest_error(peft(input_ids=ids).logits[0, :-1], expected)


def test_a_directory_holds_three_files_with_the_keys_and_settings_all_loaders_know(
    tmp_path: Path,
) -> None:
    """Names, shapes, metadata and every field of the configuration."""
    model = tiny_model()
    directory = export(tmp_path / "out", model, job_spec(r=4, alpha=8))
    assert {file.name for file in directory.iterdir()} == {CONFIG, WEIGHTS, "README.md"}
    with safe_open(directory / WEIGHTS, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    expected = {}
    for path, target in find_targets(model).items():
        expected[f"base_model.model.{path}.lora_A.weight"] = [4, target.in_features]
        expected[f"base_model.model.{path}.lora_B.weight"] = [target.out_features, 4]
    assert shapes == expected
    assert config_of(directory) == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "org/base",
        "revision": None,
        "inference_mode": True,
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": [
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ],
        "exclude_modules": None,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "target_parameters": None,
    }
    assert "org/base" in (directory / "README.md").read_text()


def test_modules_are_named_by_leaf_unless_only_some_layers_are_adapted(tmp_path: Path) -> None:
    """A leaf name would reach the layers that the job left alone."""
    model = tiny_model()
    leaves = export(tmp_path / "leaves", model, job_spec(targets=("v_proj", "q_proj")))
    paths = export(tmp_path / "paths", model, job_spec(targets=r".*layers\.1\..*(q|v)_proj"))
    assert config_of(leaves)["target_modules"] == ["q_proj", "v_proj"]
    assert config_of(paths)["target_modules"] == [
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.v_proj",
    ]


def test_modules_that_are_named_by_number_are_named_by_path(tmp_path: Path) -> None:
    """A number is a layer's name too, which PEFT cannot adapt."""
    model = tiny_model("ctrl", n_embd=32, n_layer=2, n_head=4, dff=48, n_positions=64)
    job = job_spec(targets=("0", "Wq"))
    weights = adapter_for(model, job)
    directory = export(tmp_path / "out", model, job, weights)
    assert "transformer.h.0.ffn.0" in config_of(directory)["target_modules"]
    assert peft_error(directory, model, job, weights) < 1e-5


def test_rslora_is_written_into_alpha(tmp_path: Path) -> None:
    """Some loaders ignore the flag: alpha * sqrt(r) / r is alpha / sqrt(r)."""
    model = tiny_model()
    job = job_spec(r=5, alpha=3.0, rslora=True)
    directory = export(tmp_path / "out", model, job)
    config = config_of(directory)
    assert config["use_rslora"] is False
    assert config["lora_alpha"] == pytest.approx(3.0 * 5**0.5, rel=1e-15)
    scale = read_adapter(directory, find_targets(model)).scale
    assert scale == pytest.approx(job.lora.scale, rel=1e-15)


@pytest.mark.parametrize(
    ("kind", "job"),
    [
        ("llama", job_spec(alpha=2)),
        ("llama", job_spec(alpha=2, targets=("q_proj", "down_proj"))),
        ("llama", job_spec(alpha=2, targets=LAYER_1)),
        ("llama", job_spec(alpha=0.3, r=3)),
        ("llama", job_spec(alpha=0.7, r=5, rslora=True)),
        ("gemma2", job_spec(alpha=2)),
        ("gemma2", job_spec(alpha=2, targets=LAYER_1)),
        ("gpt2", job_spec(alpha=2)),
        ("gpt2", job_spec(alpha=2, targets=LAYER_1)),
        ("gpt_neox", job_spec(alpha=2)),
        ("phi", job_spec(alpha=2)),
        ("phi3", job_spec(alpha=2)),
        ("opt", job_spec(alpha=2)),
    ],
)
def test_peft_gives_the_logits_of_the_super_model(tmp_path: Path, kind: str, job: JobSpec) -> None:
    """Through `PeftModel.from_pretrained`, on a base of its own."""
    model = tiny_model(kind)
    weights = adapter_for(model, job)
    directory = export(tmp_path / "out", model, job, weights)
    assert peft_error(directory, model, job, weights) < TOLERANCE
    assert config_of(directory)["fan_in_fan_out"] == (kind == "gpt2")


def change_config(**values: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / CONFIG).write_text(json.dumps({**config_of(directory), **values}))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})

    return apply


def rename(old: str, new: str) -> Callable[[Path], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change_tensors(change)


def transpose_square_bs(tensors: dict[str, torch.Tensor]) -> None:
    """B of a layer as wide as its rank keeps its shape when it is turned."""
    for name, tensor in tensors.items():
        if "lora_B" in name and tensor.shape[0] == tensor.shape[1]:
            tensors[name] = tensor.T.contiguous()


@pytest.mark.parametrize(
    "twin",
    [
        rename("base_model.model.model.", "base_model.model."),
        change_config(lora_alpha=2.02),
        change_config(use_rslora=True),
        change_config(target_modules=["q_proj"]),
        change_tensors(transpose_square_bs),
    ],
    ids=["prefix", "scale by 1 %", "rslora twice", "a module less", "B turned"],
)
def test_a_slightly_wrong_directory_shows_in_the_logits(
    tmp_path: Path, twin: Callable[[Path], None]
) -> None:
    """PEFT loads each of these without an error; the comparison above refuses it."""
    model = tiny_model()
    # k_proj and v_proj are 32 -> 16: at rank 16 their B is square.
    job = job_spec(r=16, alpha=2, targets=("q_proj", "k_proj", "v_proj"))
    weights = adapter_for(model, job)
    directory = export(tmp_path / "out", model, job, weights)
    assert peft_error(directory, model, job, weights) < TOLERANCE
    twin(directory)
    assert peft_error(directory, model, job, weights) > 100 * TOLERANCE


def test_reading_back_gives_every_bit(tmp_path: Path) -> None:
    """Values, names, rank, scale and base."""
    model = tiny_model()
    job = job_spec(r=3, alpha=0.1)
    weights = adapter_for(model, job)
    back = read_adapter(export(tmp_path / "out", model, job, weights), find_targets(model))
    assert (back.r, back.scale, back.base_model) == (3, 0.1 / 3, "org/base")
    assert list(back.weights) == list(weights)
    for path, pair in back.weights.items():
        assert torch.equal(pair.a, weights[path].a) and torch.equal(pair.b, weights[path].b)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_that_peft_made_can_be_read(tmp_path: Path, kind: str, dtype) -> None:
    """`get_peft_model`, `save_pretrained`, and our logits are PEFT's; half precision is widened."""
    model = tiny_model(kind)
    leaf = "q_proj" if kind == "llama" else "c_attn"
    config = LoraConfig(
        r=4, lora_alpha=3, target_modules=[leaf], init_lora_weights=False, use_rslora=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(copy.deepcopy(model), config).to(dtype).save_pretrained(tmp_path / "theirs")
        peft = PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path / "theirs")).eval()
    adapter = read_adapter(tmp_path / "theirs", find_targets(model))
    assert (adapter.r, adapter.scale) == (4, 1.5)
    assert {pair.a.dtype for pair in adapter.weights.values()} == {torch.float32}
    fused = super_model(model)
    fused.attach("a", adapter.weights, scale=adapter.scale)
    [sequence] = sequences_of([17], seed=5)
    found = super_logits(fused, packed({"a": [sequence]}))["a"]
    with torch.no_grad():
        ids = torch.from_numpy(sequence.input_ids.astype("int64"))[None]
        expected = peft(input_ids=ids).logits[0, :-1]
    assert largest_error(found, expected) < TOLERANCE


FIRST_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
FIRST_B = FIRST_A.replace("lora_A", "lora_B")


def write_weights(content: bytes) -> Callable[[Path], None]:
    return lambda directory: (directory / WEIGHTS).write_bytes(content)


def write_config(text: str | bytes) -> Callable[[Path], None]:
    content = text.encode() if isinstance(text, str) else text
    return lambda directory: (directory / CONFIG).write_bytes(content)


def cut(directory: Path) -> None:
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(content[:-100])


def sparse_giant(directory: Path) -> None:
    """A header that claims 40 GB of tensor over a file with a hole of that size."""
    entry = {"dtype": "F32", "shape": [4, 32], "data_offsets": [0, 512]}
    huge = {"dtype": "F32", "shape": [10**10], "data_offsets": [512, 512 + 4 * 10**10]}
    header = json.dumps({FIRST_A: entry, FIRST_B: huge}).encode()
    with (directory / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 512 + 4 * 10**10)


def many_empty_tensors(directory: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"tensor.{number}": entry for number in range(20_000)}).encode()
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)


def set_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return change_tensors(lambda tensors: tensors.update({name: change(tensors[name])}))


def poison(tensor: torch.Tensor) -> torch.Tensor:
    tensor[0, 0] = torch.nan
    return tensor


HOSTILE: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "cut short": (cut, WEIGHTS, "cannot be read"),
    "empty file": (write_weights(b""), WEIGHTS, "cut short"),
    "header size beyond the file": (write_weights(struct.pack("<Q", 10**6)), WEIGHTS, "claims"),
    "huge header size": (write_weights(b"\xff" * 8), WEIGHTS, "its header claims"),
    "header of zeros": (write_weights(bytes(100)), WEIGHTS, "cannot be read"),
    "no tensors": (write_weights(struct.pack("<Q", 2) + b"{}"), WEIGHTS, "no LoRA matrices"),
    "many empty tensors": (many_empty_tensors, WEIGHTS, "its header claims"),
    "a giant tensor": (sparse_giant, WEIGHTS, "bytes are more than rank 4 can need"),
    "a pickle": (write_weights(b"\x80\x04" + bytes(64)), WEIGHTS, "its header claims"),
    "a missing B": (change_tensors(lambda t: t.pop(FIRST_B)), WEIGHTS, f"{FIRST_B} is missing"),
    "a tensor of another kind": (
        change_tensors(lambda t: t.update({"lm_head.weight": torch.ones(2)})),
        WEIGHTS,
        "unexpected tensor lm_head.weight",
    ),
    "a path for a name": (
        rename(FIRST_A, "base_model.model.../../etc/passwd.lora_A.weight"),
        WEIGHTS,
        "no linear ../../etc/passwd",
    ),
    "another model's module": (rename("q_proj", "wq"), WEIGHTS, "no linear model.layers.0"),
    "another rank": (set_tensor(FIRST_A, lambda t: t[:3].clone()), WEIGHTS, "is [3, 32]"),
    "A turned": (set_tensor(FIRST_A, lambda t: t.T.contiguous()), WEIGHTS, "is [32, 4]"),
    "a NaN": (set_tensor(FIRST_B, poison), WEIGHTS, f"{FIRST_B} holds values that are not finite"),
    "integers": (set_tensor(FIRST_A, lambda t: t.to(torch.int32)), WEIGHTS, "of type I32"),
    "no weights file": (lambda d: (d / WEIGHTS).unlink(), WEIGHTS, "is missing"),
    "no config file": (lambda d: (d / CONFIG).unlink(), CONFIG, "is missing"),
    "no JSON": (write_config("{"), CONFIG, "not valid JSON"),
    "no UTF-8": (write_config(b'{"r": "\xff"}'), CONFIG, "not valid JSON"),
    "a JSON list": (write_config("[]"), CONFIG, "must hold an object"),
    "nested without end": (write_config("[" * 100_000), CONFIG, "not valid JSON"),
    "a number without end": (write_config('{"r": ' + "9" * 5000 + "}"), CONFIG, "not valid JSON"),
    "a config of megabytes": (write_config(" " * 2**21), CONFIG, "larger than"),
    "another method": (change_config(peft_type="IA3"), CONFIG, "'IA3', not LORA"),
    "DoRA": (change_config(use_dora=True), CONFIG, "use_dora is not supported"),
    "whole modules": (change_config(modules_to_save=["lm_head"]), CONFIG, "modules_to_save"),
    "rank patterns": (change_config(rank_pattern={"q_proj": 8}), CONFIG, "rank_pattern"),
    "replicated layers": (change_config(layer_replication=[[0, 2]]), CONFIG, "layer_replication"),
    "trained biases": (change_config(bias="all"), CONFIG, "bias 'all'"),
    "a base that was changed": (change_config(init_lora_weights="pissa"), CONFIG, "'pissa'"),
    "rank of zero": (change_config(r=0), CONFIG, "r must be a positive whole number, got 0"),
    "rank that is true": (change_config(r=True), CONFIG, "r must be"),
    "rank that is text": (change_config(r="4"), CONFIG, "r must be"),
    "rank that is absent": (change_config(r=None), CONFIG, "r must be"),
    "rank beyond the file's": (change_config(r=8), WEIGHTS, "r=8 need [8, 32]"),
    "alpha of NaN": (change_config(lora_alpha=float("nan")), CONFIG, "lora_alpha must be"),
    "alpha without bound": (change_config(lora_alpha=float("inf")), CONFIG, "lora_alpha must be"),
    "alpha beyond a float": (change_config(lora_alpha=10**400), CONFIG, "lora_alpha must be"),
}


@pytest.mark.parametrize("trouble", HOSTILE)
def test_a_hostile_directory_is_refused_naming_file_and_trouble(
    tmp_path: Path, trouble: str
) -> None:
    """An AdapterError whatever is wrong, and nothing large is read."""
    model = tiny_model()
    directory = export(tmp_path / "out", model, job_spec(targets=("q_proj",)))
    damage, file, reason = HOSTILE[trouble]
    damage(directory)
    with pytest.raises(AdapterError) as caught:
        read_adapter(directory, find_targets(model))
    message = str(caught.value)
    assert str(directory) in message and file in message and reason in message


def test_an_absent_directory_is_refused(tmp_path: Path) -> None:
    """By its name."""
    with pytest.raises(AdapterError, match=r"nowhere: no such adapter directory"):
        read_adapter(tmp_path / "nowhere", {})


def test_serving_commands_have_a_rank_that_the_server_knows(tmp_path: Path) -> None:
    """vLLM takes some ranks only: the next larger one, and beyond the largest it is said."""
    commands = serving_commands(tmp_path, "sql", base_model="org/base", rank=20)
    assert "--max-lora-rank 32" in commands[0] and f"sql={tmp_path}" in commands[0]
    assert "--max-lora-rank 20" in commands[1] and f"sql={tmp_path}" in commands[1]
    assert "ranks up to 512" in serving_commands(tmp_path, "sql", base_model="b", rank=513)[0]
