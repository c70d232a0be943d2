"""What a person asks for: the base model, the jobs, the engine's settings.

These frozen dataclasses are the one declaration of the job file: `config/` reads YAML into them
strictly, makes the JSON schema from them (the sentence under a field is its description) and knows
the aliases. They check what can be checked from the value alone; whatever needs the model or the
data is checked there.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

from tlora.core.errors import SpecError

JOB_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")

RUN_FILES = (
    "run.json",
    "resolved.yaml",
    "events.jsonl",
    "state.sqlite",
    "state.sqlite-wal",
    "state.sqlite-shm",
    "report.html",
    "study.json",
    "winner",
    "data.txt",
    "group.json",
    "mlflow.db",
    "tensorboard",
    "wandb",
    "mlruns",
)
"""What a run directory holds besides a directory per job."""

DType = Literal["auto", "float32", "bfloat16", "float16"]
OverLength = Literal["truncate", "drop", "raise"]
Quantization = Literal["none", "fp8", "nf4"]
Isolation = Literal["default", "exact"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]
Schedule = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "wsd",
]
Shape = Literal[
    "auto",
    "chat",
    "sharegpt",
    "alpaca",
    "prompt_completion",
    "text",
    "tokens",
    "preference",
]

# Read by pydantic where it is installed; a plain dict, so that this module does not need it.
STRICT = {"extra": "forbid", "use_attribute_docstrings": True, "allow_inf_nan": False}


def require(condition: bool, field_name: str, message: str) -> None:
    if not condition:
        raise SpecError(message, field=field_name)


def name_like(name: str) -> str:
    """A name that would do in its place, as a question."""
    near = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("._-")[:63]
    return f"; how about '{near}'?" if JOB_NAME.fullmatch(near) else ""


def check_job_name(name: str) -> None:
    require(
        JOB_NAME.fullmatch(name) is not None,
        "name",
        f"must match {JOB_NAME.pattern}, got '{name}'{name_like(name)}",
    )
    require(name not in RUN_FILES, "name", f"'{name}' is a file of the run directory")


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseSpec:
    """The frozen model that all jobs share."""

    __pydantic_config__ = STRICT

    model: str
    """A Hugging Face model id, a local directory, or `demo`: a tiny model that comes with tlora."""

    revision: str | None = None
    """Branch, tag or commit of a model on the Hub."""

    dtype: DType = "auto"
    """Number format of the frozen weights; auto takes what the checkpoint says."""

    quantization: Quantization = "none"
    """Frozen linears in fewer bits: nf4 holds them in 4, as QLoRA does; fp8 in 8, and multiplies
    bfloat16 in FP8."""

    def __str__(self) -> str:
        held = "" if self.quantization == "none" else f", quantization {self.quantization}"
        return f"{self.model}, dtype {self.dtype}{held}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSpec:
    """Size and place of the adapter."""

    __pydantic_config__ = STRICT

    r: int = 16
    """Rank: the inner dimension of the adapter."""

    lora_alpha: float = 32.0
    """The update is scaled by lora_alpha / r."""

    lora_dropout: float = 0.0
    """Share of the adapter's input that is dropped while training."""

    target_modules: str | tuple[str, ...] = "all-linear"
    """`all-linear`, a list of leaf names such as q_proj, or a regular expression over module
    paths."""

    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) instead."""

    def __post_init__(self) -> None:
        require(self.r >= 1, "lora.r", f"must be at least 1, got {self.r}")
        require(self.lora_alpha > 0, "lora.lora_alpha", f"must be positive, got {self.lora_alpha}")
        require(
            0 <= self.lora_dropout < 1,
            "lora.lora_dropout",
            f"must be in [0, 1), got {self.lora_dropout}",
        )
        require(bool(self.target_modules), "lora.target_modules", "must name at least one module")

    @property
    def scale(self) -> float:
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSpec:
    """Optimiser, schedule and length of one job."""

    __pydantic_config__ = STRICT

    learning_rate: float = 2e-4
    """Peak learning rate of AdamW."""

    lr_scheduler_type: Schedule = "cosine"
    """Shape of the learning rate over the job's steps."""

    min_lr: float = 0.0
    """Where cosine_with_min_lr, polynomial and wsd end."""

    decay_steps: int | float = 0.2
    """Last part of a wsd schedule: steps, or a fraction in [0, 1) of all steps."""

    warmup_steps: int | float = 0
    """Steps of linear warm-up, or a fraction in [0, 1) of all steps."""

    num_train_epochs: float = 3.0
    """Passes over the data; ignored where max_steps is given."""

    max_steps: int | None = None
    """Optimiser steps; overrides num_train_epochs."""

    batch_size: int = 16
    """Sequences, or preference pairs, per optimiser step."""

    max_length: int = 2048
    """Longest sequence, in tokens."""

    over_length: OverLength = "truncate"
    """What happens to longer rows: cut the prompt from the left, leave the row out, or stop."""

    max_grad_norm: float | None = 1.0
    """This job's gradient is clipped to this norm; null for no clipping."""

    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""

    adam_beta1: float = 0.9
    """Decay of AdamW's first moment."""

    adam_beta2: float = 0.999
    """Decay of AdamW's second moment."""

    adam_epsilon: float = 1e-8
    """AdamW's epsilon."""

    loss: Literal["token_mean", "sum", "dpo"] = "token_mean"
    """Mean over the batch's trained tokens, or their sum; dpo: on preference pairs, the mean over
    the batch's pairs."""

    beta: float = 0.1
    """Of dpo: how dear it is to move away from the base model."""

    label_smoothing: float = 0.0
    """Of dpo: the share of pairs taken to be labelled the wrong way round, below 0.5."""

    loss_type: Literal["sigmoid"] = "sigmoid"
    """Of dpo: its loss, as TRL names it; no other is built."""

    seed: int = 0
    """Keys the adapter's start, the data order and the dropout of this job."""

    weight: float = 1.0
    """This job's share of tokens when jobs compete."""

    logging_steps: int = 1
    """A line in metrics.jsonl every so many steps."""

    def __post_init__(self) -> None:
        require(
            self.learning_rate >= 0,
            "train.learning_rate",
            f"must not be negative, got {self.learning_rate}",
        )
        require(
            0 <= self.min_lr <= self.learning_rate,
            "train.min_lr",
            f"must be between 0 and learning_rate ({self.learning_rate}), got {self.min_lr}",
        )
        for name in ("warmup_steps", "decay_steps"):
            value = getattr(self, name)
            whole = isinstance(value, int) or value.is_integer() or 0 <= value < 1
            require(
                value >= 0 and whole,
                f"train.{name}",
                f"must be a whole number of steps or a fraction in [0, 1), got {value}",
            )
        require(0 <= self.seed < 2**64, "train.seed", f"must be in [0, 2^64), got {self.seed}")
        require(
            self.num_train_epochs > 0,
            "train.num_train_epochs",
            f"must be positive, got {self.num_train_epochs}",
        )
        require(
            self.max_steps is None or self.max_steps >= 1,
            "train.max_steps",
            f"must be at least 1, got {self.max_steps}",
        )
        for name in ("batch_size", "logging_steps"):
            value = getattr(self, name)
            require(value >= 1, f"train.{name}", f"must be at least 1, got {value}")
        require(
            self.max_length >= 2, "train.max_length", f"must be at least 2, got {self.max_length}"
        )
        require(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            "train.max_grad_norm",
            f"must be positive, or null for no clipping, got {self.max_grad_norm}",
        )
        require(
            self.weight_decay >= 0,
            "train.weight_decay",
            f"must not be negative, got {self.weight_decay}",
        )
        for name in ("adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"train.{name}", f"must be in [0, 1), got {value}")
        require(
            self.adam_epsilon > 0,
            "train.adam_epsilon",
            f"must be positive, got {self.adam_epsilon}",
        )
        require(self.weight > 0, "train.weight", f"must be positive, got {self.weight}")
        require(self.beta > 0, "train.beta", f"must be positive, got {self.beta}")
        require(
            0 <= self.label_smoothing < 0.5,
            "train.label_smoothing",
            f"must be in [0, 0.5), got {self.label_smoothing}",
        )

    @property
    def on_pairs(self) -> bool:
        """Whether its rows are preference pairs."""
        return self.loss == "dpo"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSpec:
    """Held-out loss while training."""

    __pydantic_config__ = STRICT

    split: float | int = 0
    """Held out from the training data: a fraction in (0, 1), or a number of rows; 0 for none."""

    steps: int | None = None
    """Evaluate every so many steps, and at the end; null for the end only."""

    batch_limit: int | None = None
    """Use at most so many held-out rows."""

    patience: int | None = None
    """Stop early after so many evaluations without improvement; null to go on to the end."""

    def __post_init__(self) -> None:
        whole = isinstance(self.split, int) or 0 <= self.split < 1
        require(
            self.split >= 0 and whole,
            "eval.split",
            f"must be a fraction in [0, 1) or a whole number of rows, got {self.split}",
        )
        for name in ("steps", "batch_limit", "patience"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"eval.{name}", f"must be at least 1, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSpec:
    """Checkpoints while training."""

    __pydantic_config__ = STRICT

    steps: int | None = 100
    """Save every so many steps; null for interruptions only."""

    total_limit: int | None = 2
    """Keep at most so many checkpoints; null keeps all."""

    def __post_init__(self) -> None:
        for name in ("steps", "total_limit"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"save.{name}", f"must be at least 1, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """Where the rows are and what they look like."""

    __pydantic_config__ = STRICT

    path: str | tuple[str, ...]
    """A file (JSON, JSONL, CSV, Parquet; also .gz, .zst), a directory, or a Hugging Face dataset
    id."""

    eval_path: str | tuple[str, ...] | None = None
    """Held-out rows in files of their own, instead of eval.split."""

    shape: Shape = "auto"
    """The kind of rows; auto looks at the first one and says what it found."""

    columns: dict[str, str] = field(default_factory=dict[str, str])
    """Maps our key to yours: {prompt: question, completion: answer}."""

    train_on: Literal["completion", "all"] = "completion"
    """Train on the assistant's tokens only, or on every token."""

    chat_template: str | None = None
    """A Jinja chat template, or a file that holds one, instead of the tokenizer's own."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """One adapter to train. Never changes after it is submitted."""

    __pydantic_config__ = STRICT

    name: str
    """Lower-case letters, digits, dots, dashes and underscores; also the name of its directory."""

    data: DataSpec
    """What it learns from."""

    lora: LoraSpec = field(default_factory=LoraSpec)
    """Size and place of the adapter."""

    train: TrainSpec = field(default_factory=TrainSpec)
    """Optimiser, schedule and length."""

    eval: EvalSpec = field(default_factory=EvalSpec)
    """Held-out loss while training."""

    save: SaveSpec = field(default_factory=SaveSpec)
    """Checkpoints while training."""

    init_from: str | None = None
    """A PEFT adapter directory to start from."""

    def __post_init__(self) -> None:
        check_job_name(self.name)
        require(
            self.eval.patience is None or self.holds_out,
            "eval.patience",
            "stops by the held-out loss, and the job holds no rows out; set eval.split or "
            "data.eval_path, or leave it null",
        )
        require(
            not self.train.on_pairs or self.data.train_on == "completion",
            "data.train_on",
            "must be completion where train.loss is dpo: a pair is told apart by its answers, and "
            "the prompt is the same in both",
        )
        require(
            not self.train.on_pairs or self.data.shape in ("auto", "preference"),
            "data.shape",
            f"must be preference or auto where train.loss is dpo, got '{self.data.shape}'",
        )

    @property
    def holds_out(self) -> bool:
        """Whether it has rows to be evaluated on."""
        return self.eval.split != 0 or self.data.eval_path is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """How the jobs are run together; changes speed and memory, not what is learnt."""

    __pydantic_config__ = STRICT

    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    nano_batch_tokens: int | Literal["auto", "tuned"] = "auto"
    """Tokens in one forward and backward pass, shared by the jobs; tuned: found by measuring, as
    auto does on a GPU."""

    isolation: Isolation = "default"
    """exact: the same bits whoever shares the device."""

    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more time."""

    compile: bool | Literal["auto"] = "auto"
    """Layers through torch.compile: faster steps after first ones that take a minute. auto: on a
    GPU."""

    max_parallel: int | None = None
    """At most so many jobs train at once on one device, the others wait their turn in the order of
    the file; null: as many as have room."""

    def __post_init__(self) -> None:
        require(
            DEVICE.fullmatch(self.device) is not None,
            "engine.device",
            f"must be auto, cpu, cuda or cuda:N, got '{self.device}'",
        )
        tokens = self.nano_batch_tokens
        require(
            isinstance(tokens, str) or tokens >= 1,
            "engine.nano_batch_tokens",
            f"must be at least 1, got {tokens}",
        )
        require(
            tokens != "tuned" or self.isolation != "exact",
            "engine.nano_batch_tokens",
            "exact isolation needs nano-batches of one size; set a number, or auto",
        )
        most = self.max_parallel
        require(most is None or most >= 1, "engine.max_parallel", f"must be at least 1, got {most}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """A whole job file, resolved: defaults merged, aliases replaced."""

    __pydantic_config__ = STRICT

    base: BaseSpec
    """The frozen model that all jobs share."""

    jobs: tuple[JobSpec, ...]
    """The adapters to train."""

    engine: EngineSpec = field(default_factory=EngineSpec)
    """How the jobs are run together."""

    report_to: tuple[Tracker, ...] = ()
    """Trackers to write to besides the run directory."""

    def __post_init__(self) -> None:
        require(bool(self.jobs), "jobs", "the file lists no jobs")
        require(
            self.base.quantization != "fp8" or self.engine.isolation != "exact",
            "base.quantization",
            "products in FP8 are not shown to keep their bits, which exact isolation needs; use "
            "nf4 or none",
        )
        seen: set[str] = set()
        for job in self.jobs:
            if job.name in seen:
                raise SpecError("two jobs have this name", job=job.name, field="name")
            seen.add(job.name)
