"""Spellings of fields: aliases, flat and nested, given once or twice."""

import pytest

from tlora.config import load_spec
from tlora.config.fields import ALIASES, JOB, PER_DEVICE, section_of, short
from tlora.core.errors import SpecError
from tlora.core.job import BaseSpec, JobSpec

SAMPLES = {
    "lora.r": 7,
    "lora.lora_alpha": 3.0,
    "lora.lora_dropout": 0.25,
    "lora.target_modules": ("q_proj",),
    "train.learning_rate": 0.5,
    "train.lr_scheduler_type": "linear",
    "train.warmup_steps": 0.5,
    "train.num_train_epochs": 7.0,
    "train.max_length": 77,
    "train.beta": 0.5,
    "train.label_smoothing": 0.25,
    "train.loss_type": "sigmoid",
    "train.per_device_train_batch_size": 7,
    "eval.split": 0.25,
    "eval.steps": 7,
    "save.steps": 7,
    "save.total_limit": 7,
}


def load(**fields: object) -> JobSpec:
    tree = {"base": "org/model", "jobs": [{"name": "a", "data": "org/rows", **fields}]}
    return load_spec(tree).jobs[0]


def load_over(defaults: dict[str, object], **fields: object) -> JobSpec:
    jobs = [{"name": "a", "data": "org/rows", **fields}]
    return load_spec({"base": "org/model", "defaults": defaults, "jobs": jobs}).jobs[0]


def value_of(job: JobSpec, name: str) -> object:
    name = "train.batch_size" if name == PER_DEVICE else name
    return getattr(getattr(job, section_of(name)), short(name))


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_is_accepted_flat_and_in_its_section(alias: str, name: str) -> None:
    """In the job and in the defaults."""
    sample = SAMPLES[name]
    for written in ({alias: sample}, {section_of(name): {alias: sample}}):
        assert value_of(load(**written), name) == sample
        assert value_of(load_over(written), name) == sample


@pytest.mark.parametrize(
    "name", [name for name in JOB.fields if name.startswith(("lora.", "train."))]
)
def test_every_field_of_lora_and_train_is_known_flat(name: str) -> None:
    """As in the flat files of other trainers."""
    assert JOB.sections[""][short(name)] == name


@pytest.mark.parametrize("key", ["eval_steps", "save_steps", "save_total_limit"])
def test_what_transformers_keeps_among_the_training_arguments_is_accepted_there(key: str) -> None:
    """People move their TrainingArguments into `train`."""
    assert value_of(load(train={key: 9}), ALIASES[key]) == 9


def test_one_value_under_two_spellings_is_fine() -> None:
    """It is only said twice."""
    assert load(lr="1e-4", train={"learning_rate": 0.0001}).train.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("fields", "name", "spellings"),
    [
        ({"rank": 4, "lora": {"r": 8}}, "lora.r", ("rank is 4", "lora.r is 8")),
        ({"lora": {"lora_r": 4, "rank": 8}}, "lora.r", ("lora.lora_r is 4", "lora.rank is 8")),
        (
            {"warmup_ratio": 0.1, "warmup_steps": 10},
            "train.warmup_steps",
            ("warmup_ratio is 0.1", "warmup_steps is 10"),
        ),
    ],
)
def test_two_spellings_with_two_values_are_refused(
    fields: dict[str, object], name: str, spellings: tuple[str, str]
) -> None:
    """The message shows both as they were written."""
    with pytest.raises(SpecError) as caught:
        load(**fields)
    assert (caught.value.job, caught.value.field) == ("a", name)
    assert "given twice" in caught.value.message
    assert all(spelling in caught.value.message for spelling in spellings)


def test_warmup_ratio_becomes_a_fraction_and_may_not_reach_one() -> None:
    """A ratio of 1 would be read as one step."""
    assert load(warmup_ratio="0.03").train.warmup_steps == 0.03
    with pytest.raises(SpecError, match=r"job 'a': train.warmup_steps: .*\[0, 1\).*warmup_ratio"):
        load(warmup_ratio=1.0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"per_device_train_batch_size": 4}, 4),
        ({"gradient_accumulation_steps": 8}, 8),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}, 32),
        ({"train": {"per_device_train_batch_size": 4}, "gradient_accumulation_steps": 2}, 8),
        ({"batch_size": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, 8),
    ],
)
def test_the_batch_size_is_the_product_of_its_factors(
    fields: dict[str, object], expected: int
) -> None:
    """A factor that is not given counts as one."""
    assert load(**fields).train.batch_size == expected


def test_a_batch_size_that_contradicts_its_factors_is_refused() -> None:
    """Both numbers are shown."""
    with pytest.raises(SpecError, match=r"job 'a': train.batch_size: is 16, but .* 4 x 2 = 8"):
        load(batch_size=16, per_device_train_batch_size=4, gradient_accumulation_steps=2)


def test_factors_below_one_are_refused() -> None:
    """Two negative factors would make a good product."""
    with pytest.raises(SpecError, match=r"train\.per_device_train_batch_size: must be at least 1"):
        load(per_device_train_batch_size=-4)


def test_a_job_may_state_the_batch_the_other_way_than_the_defaults() -> None:
    """Its own way silences the one below, and a single factor replaces a single factor."""
    factors: dict[str, object] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 8,
    }
    assert load_over(factors, batch_size=3).train.batch_size == 3
    assert load_over({"batch_size": 64}, per_device_train_batch_size=2).train.batch_size == 2
    assert load_over(factors, per_device_train_batch_size=2).train.batch_size == 16


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min_lr": 1e-5}, 1e-5),
        ({"lr_scheduler_kwargs": {"min_lr": 1e-5}}, 1e-5),
        ({"lr_scheduler_kwargs": {"lr_end": "1e-5"}}, 1e-5),
        ({"train": {"lr_scheduler_kwargs": {"min_lr_rate": 0.5}}}, 0.5e-3),
        ({"min_lr_rate": 0.5, "lr": 1e-2}, 0.5e-2),
    ],
)
def test_the_lowest_rate_may_be_given_as_transformers_does(
    fields: dict[str, object], expected: float
) -> None:
    """A share is taken of the learning rate that the job ends up with."""
    assert load_over({"lr": 1e-3}, **fields).train.min_lr == expected


def test_the_lowest_rate_given_both_ways_is_refused() -> None:
    """Whether they agree depends on another field."""
    with pytest.raises(SpecError, match=r"train\.min_lr: give min_lr or min_lr_rate"):
        load(min_lr=0, min_lr_rate=0.1)


@pytest.mark.parametrize(
    ("fields", "name", "expected"),
    [
        ({"max_steps": -1}, "train.max_steps", None),
        ({"max_steps": "-1"}, "train.max_steps", None),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "train.lr_scheduler_type", "wsd"),
        ({"lora_target": "all"}, "lora.target_modules", "all-linear"),
        ({"lora_target": "q_proj, v_proj"}, "lora.target_modules", ("q_proj", "v_proj")),
        ({"target_modules": r".*\.q_proj"}, "lora.target_modules", r".*\.q_proj"),
    ],
)
def test_values_of_other_tools_are_understood(
    fields: dict[str, object], name: str, expected: object
) -> None:
    """The field holds our word for them."""
    assert value_of(load(**fields), name) == expected


def base_of(**fields: object) -> BaseSpec:
    jobs = [{"name": "a", "data": "org/rows"}]
    return load_spec({"base": {"model": "org/model", **fields}, "jobs": jobs}).base


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"quantization": "nf4"}, "nf4"),
        ({"quantization": "fp8"}, "fp8"),
        ({"load_in_4bit": True}, "nf4"),
        ({"load_in_4bit": "true"}, "nf4"),
        ({"load_in_4bit": False}, "none"),
        ({"quantization_bit": 4}, "nf4"),
        ({"quantization_bit": None}, "none"),
        ({"quantization": False}, "none"),
        ({}, "none"),
    ],
)
def test_bases_in_four_bits_may_be_asked_for_in_the_words_of_others(
    fields: dict[str, object], expected: str
) -> None:
    """Of bitsandbytes, Axolotl and LLaMA-Factory."""
    assert base_of(**fields).quantization == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization": "int3"}, "base.quantization"),
        ({"quantization": 1}, "base.quantization: must be one of none, fp8, nf4, got 1"),
        ({"quantization_bit": 1}, r"got 1 \(written as base\.quantization_bit\)"),
        ({"quantization_bit": 0}, r"got 0 \(written as base\.quantization_bit\)"),
        ({"quantization_bit": 8}, r"got 8 \(written as base\.quantization_bit\)"),
        (
            {"load_in_8bit": True},
            "base.load_in_8bit: unknown key; eight bits are 'base.quantization: fp8'",
        ),
        ({"load_in_4bit": True, "quantization": "fp8"}, "base.quantization"),
    ],
)
def test_bits_that_are_not_to_be_had_are_refused(fields: dict[str, object], message: str) -> None:
    """With what there is instead."""
    with pytest.raises(SpecError, match=message):
        base_of(**fields)


@pytest.mark.parametrize("off", [False, "false", None])
def test_bits_that_are_not_asked_for_need_not_be_there(off: object) -> None:
    """As configs are made that name every switch. 0 is no switch."""
    assert base_of(load_in_8bit=off, load_in_4bit=True).quantization == "nf4"
    assert base_of(load_in_8bit=off).quantization == "none"
    with pytest.raises(SpecError, match="eight bits are"):
        base_of(load_in_8bit=0)


@pytest.mark.parametrize(
    ("key", "section"), [("dtype", "base"), ("load_in_4bit", "base"), ("device", "engine")]
)
def test_what_all_jobs_share_is_sent_to_its_section(key: str, section: str) -> None:
    """From a job, from the defaults, and from the top of the file."""
    where = f"'{key}' belongs in '{section}'"
    for refused in (lambda: load(**{key: 1}), lambda: load_over({key: 1})):
        with pytest.raises(SpecError, match=f"{where} at the top of the file"):
            refused()
    with pytest.raises(SpecError, match=where):
        load_spec({"base": "org/model", key: 1, "jobs": [{"name": "a", "data": "org/rows"}]})


@pytest.mark.parametrize("place", ["jobs", "train", "defaults"])
def test_words_for_the_base_are_sent_there_from_a_job(place: str) -> None:
    """Configs of tools with one job have everything in one place."""
    for key in ("quantization", "load_in_4bit", "quantization_bit", "dtype"):
        job: dict[str, object] = {"name": "a", "data": "org/rows"}
        file = {"base": "org/model", "jobs": [job]}
        match place:
            case "jobs":
                job[key] = "nf4"
            case "train":
                job["train"] = {key: "nf4"}
            case _:
                file["defaults"] = {key: "nf4"}
        with pytest.raises(SpecError, match=f"'{key}' belongs in 'base' at the top of the file"):
            load_spec(file)
    with pytest.raises(SpecError, match=r"eight bits are 'base\.quantization: fp8'"):
        load_spec({"base": "org/model", "jobs": [{"name": "a", "load_in_8bit": True}]})
