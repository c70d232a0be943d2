"""The words a job file may use: every field by its canonical dotted name, and its other spellings.

Fields and their types come from the dataclasses of `core/job.py`. What is added here is only what
other tools taught people to type: aliases, flat spellings, short forms, other words for a value.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from typing import get_type_hints

from tlora.core.job import BaseSpec, EngineSpec, JobSpec, RunSpec

ALIASES = {
    "lora_r": "lora.r",
    "lora_rank": "lora.r",
    "rank": "lora.r",
    "alpha": "lora.lora_alpha",
    "dropout": "lora.lora_dropout",
    "lora_target_modules": "lora.target_modules",
    "lora_target": "lora.target_modules",
    "lr": "train.learning_rate",
    "lr_scheduler": "train.lr_scheduler_type",
    "warmup_ratio": "train.warmup_steps",
    "n_epochs": "train.num_train_epochs",
    "epochs": "train.num_train_epochs",
    "num_epochs": "train.num_train_epochs",
    "micro_batch_size": "train.per_device_train_batch_size",
    "pref_beta": "train.beta",
    "rl_beta": "train.beta",
    "pref_loss": "train.loss_type",
    "dpo_label_smoothing": "train.label_smoothing",
    "max_seq_length": "train.max_length",
    "sequence_len": "train.max_length",
    "cutoff_len": "train.max_length",
    "val_set_size": "eval.split",
    "val_size": "eval.split",
    "eval_steps": "eval.steps",
    "save_steps": "save.steps",
    "save_total_limit": "save.total_limit",
}
"""Another spelling -> the field. Accepted flat in a job and in the field's own section."""

PER_DEVICE = "train.per_device_train_batch_size"
ACCUMULATION = "train.gradient_accumulation_steps"
MIN_LR_RATE = "train.min_lr_rate"

PARTS: dict[str, object] = {PER_DEVICE: int, ACCUMULATION: int, MIN_LR_RATE: float}
"""Fields that a file may hold but a resolved job does not: `layers.finish` replaces them."""

SCHEDULER_KWARGS = "train.lr_scheduler_kwargs"
SCHEDULER_ALIASES = {
    "min_lr": "train.min_lr",
    "lr_end": "train.min_lr",
    "min_lr_rate": MIN_LR_RATE,
    "min_lr_ratio": MIN_LR_RATE,
    "num_decay_steps": "train.decay_steps",
}
"""What transformers takes in lr_scheduler_kwargs and we take as fields."""

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.half": "float16",
    "torch.float32": "float32",
}

RUN_ALIASES = {
    "load_in_4bit": "base.quantization",
    "quantization_bit": "base.quantization",
}
"""The same for fields outside of jobs; accepted in the field's own section."""

ABSENT = {
    "load_in_8bit": "eight bits are 'base.quantization: fp8' here, four 'base.quantization: nf4'",
}
"""What other tools have and this one has not, and what to write instead. False may stand."""

OTHER_WORDS: dict[str, dict[object, object]] = {
    "base.dtype": {**DTYPES},
    "base.quantization": {
        **dict.fromkeys((True, "true", 4, "4"), "nf4"),
        **dict.fromkeys((False, "false", None), "none"),
    },
    "train.lr_scheduler_type": {"warmup_stable_decay": "wsd"},
    "train.max_steps": {-1: None, "-1": None},
    "lora.target_modules": {"all": "all-linear"},
    "report_to": {"none": (), None: ()},
}
"""Values that other tools write differently."""

SWEEP_KEYS = ("task", "tasks", "search", "early_exit")
"""What a sweep file holds in place of jobs."""

COMMA_LIST = re.compile(r"\w+(\s*,\s*\w+)+")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which keys a mapping may hold, at its top (section "") and in each of its sections."""

    fields: dict[str, object]
    """Canonical dotted name -> type."""

    sections: dict[str, dict[str, str]]
    """Section -> key as written -> the field or the section it stands for."""

    shorthands: dict[str, str]
    """Section -> the field that a bare value in its place stands for."""


def leaves(spec: type, prefix: str = "") -> dict[str, object]:
    """The fields of a dataclass by dotted name, nested dataclasses opened."""
    if not is_dataclass(spec):
        raise TypeError(f"{spec} is not a dataclass")
    hints = get_type_hints(spec)
    found: dict[str, object] = {}
    for field in fields(spec):
        annotation = hints[field.name]
        if is_dataclass(annotation) and isinstance(annotation, type):
            found |= leaves(annotation, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = annotation
    return found


def short(name: str) -> str:
    """The last word of a dotted name."""
    return name.rpartition(".")[2]


def section_of(name: str) -> str:
    """All but the last word of a dotted name."""
    return name.rpartition(".")[0]


def job_vocabulary() -> Vocabulary:
    known = {**leaves(JobSpec), **PARTS}
    sections: dict[str, dict[str, str]] = {"": {}}
    for name in known:
        sections.setdefault(section_of(name), {})[short(name)] = name
    for alias, name in ALIASES.items():
        sections[section_of(name)][alias] = name
        if section_of(name) in ("eval", "save"):
            sections["train"][alias] = name
    sections["train"][short(SCHEDULER_KWARGS)] = SCHEDULER_KWARGS
    top = sections[""]
    flat = {**sections["lora"], **sections["train"], **ALIASES}
    sections[""] = {**{name: name for name in sections if name}, **flat, **top}
    sections[SCHEDULER_KWARGS] = dict(SCHEDULER_ALIASES)
    return Vocabulary(known, sections, {"data": "data.path"})


def run_vocabulary() -> Vocabulary:
    """The top of the file without `defaults` and `jobs`, which hold job fields."""
    known = {
        **leaves(BaseSpec, "base."),
        **leaves(EngineSpec, "engine."),
        "report_to": get_type_hints(RunSpec)["report_to"],
    }
    sections: dict[str, dict[str, str]] = {"": {"base": "base", "engine": "engine"}}
    for name in known:
        sections.setdefault(section_of(name), {})[short(name)] = name
    for alias, name in RUN_ALIASES.items():
        sections[section_of(name)][alias] = name
    return Vocabulary(known, sections, {"base": "base.model"})


JOB = job_vocabulary()
RUN = run_vocabulary()


def usual_word(name: str, value: object) -> object:
    """The value in the words of `core/job.py`."""
    if name == "lora.target_modules" and isinstance(value, str) and COMMA_LIST.fullmatch(value):
        return [part.strip() for part in value.split(",")]
    if value is None or isinstance(value, (str, int)):
        words = OTHER_WORDS.get(name, {})
        # Of this type: to Python 1 is True, and one bit is not four.
        return next((ours for word, ours in words.items() if _is_same(word, value)), value)
    return value


def _is_same(word: object, value: object) -> bool:
    return type(word) is type(value) and word == value


def is_left_out(key: str, value: object) -> bool:
    """Something that is not there, and need not be."""
    return key in ABSENT and any(_is_same(word, value) for word in (False, "false", None))


def unknown_key(key: str, vocabulary: Vocabulary, section: str) -> str:
    """What to say about a key that may not stand here."""
    if vocabulary is RUN and section == "" and key in JOB.sections[""]:
        return f"unknown key; '{key}' belongs in 'defaults' or in a job"
    if vocabulary is RUN and section == "" and key in SWEEP_KEYS:
        return f"unknown key; '{key}' makes this a sweep: tlora tune runs it"
    if vocabulary is JOB and key in RUN.sections[""]:
        return f"unknown key; '{key}' belongs at the top of the file"
    if key in ABSENT:
        return f"unknown key; {ABSENT[key]}"
    homes = _homes(key, vocabulary)
    if homes:
        return f"unknown key; '{key}' belongs in {homes}"
    homes = _homes(key, RUN)
    if homes:
        return f"unknown key; '{key}' belongs in {homes} at the top of the file"
    candidates = list(vocabulary.sections[section])
    if vocabulary is RUN and section == "":
        candidates += ["defaults", "jobs"]
    return f"unknown key; {nearest(key, candidates)}"


def _homes(key: str, vocabulary: Vocabulary) -> str:
    """The sections that have it."""
    return " or ".join(
        f"'{name}'" for name, keys in vocabulary.sections.items() if name and key in keys
    )


def nearest(word: str, candidates: list[str]) -> str:
    """A guess at what was meant, or everything that could have been."""
    by_lower: Mapping[str, str] = {candidate.lower(): candidate for candidate in candidates}
    close = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{by_lower[close[0]]}'?"
    shown = ", ".join(sorted(candidates)[:12]) + (", ..." if len(candidates) > 12 else "")
    return f"known here: {shown}"
