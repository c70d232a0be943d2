"""What a benchmark is asked to do: options as people write them, checked, before torch is loaded.

`HELP` and `settings_of` are the one declaration that the verb and `python -m
tlora.runtime.benchmark` share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from tlora.core.assets import BENCH
from tlora.core.errors import SpecError
from tlora.core.job import Quantization

NAMED_LENGTHS = "short_mixed"
SHAPES = ("llama-8b", "llama-1b", "demo")
ARMS = ("fused", "own", "compiled", "one-at-a-time", "plain", "peft", "processes")
"""In the order of a round."""

SEVERAL = ("ranks", "batch", "arms")
"""Options that take a list."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = get_args(Quantization)

HELP = {
    "shape": "llama-8b, llama-1b (random weights), demo (the base that comes with tlora), or a "
    "local model's directory. Default: llama-1b on CUDA, else demo.",
    "jobs": "Jobs to train.",
    "ranks": "LoRA ranks, given to the jobs in turn; may be given several times.",
    "batch": "Sequences per optimiser step, given to the jobs in turn; may be given several times.",
    "lengths": "One length for all sequences, or a file with one per line to draw from. Default: "
    f"{NAMED_LENGTHS}, which comes with tlora, for demo; else 512.",
    "json": "Append the result to this file, one line per run; without it the line is printed.",
    "steps": "Optimiser steps of each job. Default: 12 for demo, else 6.",
    "repeats": "Measured rounds; each runs every arm, and the first one again at its end.",
    "dropout": "Dropout of the adapters.",
    "budget": "Tokens of a nano-batch. Default: 8192 on CUDA, 2048 for demo, else 1024.",
    "device": "auto, cpu or cuda.",
    "threads": "CPU threads. Default: as many as torch takes.",
    "dtype": "Number format of the frozen weights: auto, float32, bfloat16 or float16. auto: "
    "a model's own; for the llama shapes bfloat16 on CUDA, else float32.",
    "quantization": "Our linears in fewer bits: none, fp8 or nf4. The frozen backbone as it is and "
    "with compiled layers, and PEFT, stay in full.",
    "arms": "What to measure: fused, own (our backbone with no adapters), compiled (the frozen "
    "backbone with compiled layers), one-at-a-time, plain (the frozen backbone as it is), peft, "
    "processes (on a CPU: fused and PEFT again, a process of one thread for each thread). fused is "
    "always measured. May be given several times.",
    "seconds": "Begin nothing more after so many seconds, and report what was measured by then. "
    "Default: no limit.",
    "skip_peft": "Leave PEFT out.",
    "skip_compile": "No compiled layers, neither for the frozen backbone nor for ours.",
    "compile_seconds": "Give compiling up after so many seconds.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """None: to be chosen once the device is known."""

    shape: str | None = None
    jobs: int = 8
    ranks: tuple[int, ...] = (4, 8, 16, 32)
    batch: tuple[int, ...] = (1, 2, 4)
    lengths: str | None = None
    json: Path | None = None
    steps: int | None = None
    repeats: int = 5
    dropout: float = 0.0
    budget: int | None = None
    device: str = "auto"
    threads: int | None = None
    dtype: str = "auto"
    quantization: str = "none"
    arms: tuple[str, ...] = ARMS
    seconds: int | None = None
    skip_peft: bool = False
    skip_compile: bool = False
    compile_seconds: int = 180

    def __post_init__(self) -> None:
        for name in ("jobs", "steps", "repeats", "budget", "threads", "seconds", "compile_seconds"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, f"must be at least 1, got {value}")
        for name in ("ranks", "batch"):
            for value in getattr(self, name):
                require(value >= 1, name, f"must be at least 1, got {value}")
        require(0 <= self.dropout < 1, "dropout", f"must be in [0, 1), got {self.dropout}")
        require(
            self.dtype in DTYPES, "dtype", f"must be one of {', '.join(DTYPES)}, got {self.dtype}"
        )
        require(
            self.quantization in QUANTIZATIONS,
            "quantization",
            f"must be one of {', '.join(QUANTIZATIONS)}, got {self.quantization}",
        )
        for name in self.arms:
            known = ", ".join(ARMS)
            require(name in ARMS, "arms", f"'{name}' is none of {known}")
        if self.shape is not None:
            check_shape(self.shape)
        if self.lengths is not None:
            read_lengths(self.lengths)
        if self.json is not None:
            parent = self.json.expanduser().parent
            require(parent.is_dir(), "json", f"there is no directory {parent}")

    @property
    def kinds(self) -> list[str]:
        """Arms to run, in the order of a round."""
        skipped = {"peft"} if self.skip_peft else set()
        skipped |= {"compiled"} if self.skip_compile else set()
        return [arm for arm in ARMS if arm == "fused" or (arm in self.arms and arm not in skipped)]


def require(condition: bool, name: str, message: str) -> None:
    if not condition:
        raise SpecError(message, field=flag(name))


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def settings_of(given: Mapping[str, object]) -> Settings:
    """From an option each. `ranks`, `batch` and `arms` are as often as they were said texts such as
    `4,8`, one after the other; None leaves what they are by themselves."""
    values = {name: value for name, value in given.items() if name not in SEVERAL}
    for name in SEVERAL:
        texts = given.get(name)
        if texts is not None:
            assert isinstance(texts, (list, tuple))
            parts = [part.strip() for text in texts for part in text.split(",")]
            values[name] = tuple(parts) if name == "arms" else whole_numbers(name, parts)
    return Settings(**values)  # type: ignore[arg-type]


def whole_numbers(name: str, parts: Sequence[str]) -> tuple[int, ...]:
    try:
        return tuple(map(int, parts))
    except ValueError:
        raise SpecError(
            f"must be whole numbers with commas between, got '{','.join(parts)}'", field=flag(name)
        ) from None


def check_shape(shape: str) -> None:
    require(
        shape in SHAPES or (Path(shape).expanduser() / "config.json").is_file(),
        "shape",
        f"'{shape}' is neither one of {', '.join(SHAPES)} nor a directory with a config.json",
    )


def read_lengths(source: str) -> tuple[int, ...]:
    """`512`, the name of the file that comes with tlora, or a file of one's own."""
    if source.isdecimal():
        return (_length(source, flag("lengths")),)
    path = BENCH / f"{source}.txt" if source == NAMED_LENGTHS else Path(source).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise SpecError(
            f"'{source}' is neither a length nor a file that can be read: {reason}",
            field=flag("lengths"),
        ) from None
    found = tuple(
        _length(line, f"{source}:{number}")
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    )
    require(bool(found), "lengths", f"{source} holds no lengths")
    return found


def _length(text: str, place: str) -> int:
    """Two tokens at least: the first of a sequence is not predicted."""
    if not text.strip().isdecimal() or int(text) < 2:
        raise SpecError(f"must be a length of 2 tokens or more, got '{text.strip()}'", field=place)
    return int(text)
