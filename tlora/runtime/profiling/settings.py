"""What a profile is asked for: options, checked, before torch is loaded.

`HELP` and `Settings` are the one declaration that the verb and `python -m tlora.runtime.profiling`
share.
"""

from dataclasses import dataclass
from pathlib import Path

from tlora.core.errors import SpecError
from tlora.runtime.benchmark.settings import DTYPES, check_shape, flag, require
from tlora.runtime.benchmark.settings import HELP as BENCH_HELP

SECONDS = 60.0
REPEATS = 5
MIN_TOKENS = 64
MIN_SECONDS = 1.0

HELP = {
    "output": "Write the profile to this file; one that is there is replaced.",
    "shape": BENCH_HELP["shape"],
    "seconds": "Measure nano-batches for so long at most; what is not reached is left out. "
    "Loading, warming up (twice as long at most) and the group at the end come on top.",
    "repeats": "Measure every nano-batch so many times at most; their median counts.",
    "tokens": "The largest nano-batch. Default: 16384 on CUDA, 2048 for demo, else 1024.",
    "device": BENCH_HELP["device"],
    "threads": BENCH_HELP["threads"],
    "dtype": BENCH_HELP["dtype"],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """None: to be chosen once the device is known."""

    output: Path
    shape: str | None = None
    seconds: float = SECONDS
    repeats: int = REPEATS
    tokens: int | None = None
    device: str = "auto"
    threads: int | None = None
    dtype: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("repeats", 1), ("threads", 1), ("tokens", MIN_TOKENS)):
            value = getattr(self, name)
            require(value is None or value >= least, name, f"must be at least {least}, got {value}")
        seconds = self.seconds
        require(
            seconds >= MIN_SECONDS, "seconds", f"must be at least {MIN_SECONDS:g}, got {seconds:g}"
        )
        require(
            self.dtype in DTYPES, "dtype", f"must be one of {', '.join(DTYPES)}, got {self.dtype}"
        )
        if self.shape is not None:
            check_shape(self.shape)
        check_writable(self.output.expanduser())


def check_writable(path: Path) -> None:
    """Before minutes of measuring, not after. What is there stays, and nothing is left behind."""
    require(not path.is_dir(), "output", f"{path} is a directory; name a file")
    require(path.parent.is_dir(), "output", f"there is no directory {path.parent}")
    is_new = not path.exists()
    try:
        path.open("a", encoding="utf-8").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise SpecError(
            f"{path} cannot be written: {error.strerror}", field=flag("output")
        ) from None
