"""The one place that reads environment variables and quietens the libraries underneath."""

import os
import shlex
import sys
from pathlib import Path

from tlora.core.errors import SpecError
from tlora.kernels import cache
from tlora.runtime.quota import cpu_quota


def cache_directory() -> Path:
    """Where tokenised data is kept: TLORA_CACHE, or tlora in the user's cache directory."""
    try:
        path = cache.base()
    except RuntimeError as error:
        # Users of a container may have no home.
        raise SpecError(
            f"there is no place for tokenised data: {error} Set TLORA_CACHE to a directory",
            field="TLORA_CACHE",
        ) from error
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(
            f"{path} cannot be used for tokenised data: {error.strerror}; set TLORA_CACHE to a "
            "directory that can",
            field="TLORA_CACHE",
        ) from error
    return path


def quieten_libraries() -> None:
    """transformers logs at length and draws bars of its own; we say what matters."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def wandb_project() -> str:
    """Where Weights & Biases keeps the runs: WANDB_PROJECT, or tlora."""
    return os.environ.get("WANDB_PROJECT") or "tlora"


def mlflow_uri() -> str | None:
    """Where MLflow keeps the runs: MLFLOW_TRACKING_URI, if set."""
    return os.environ.get("MLFLOW_TRACKING_URI")


def allowed_cores() -> int:
    """Those that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_cores() -> int:
    """As many of them as a container lets it use at once."""
    quota = cpu_quota()
    return allowed_cores() if quota is None else max(1, min(allowed_cores(), int(quota)))


def threads_are_chosen() -> bool:
    """Whether somebody has said how many threads there are to be."""
    return bool(os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS"))


def waiting_is_chosen() -> bool:
    """Whether somebody has said how threads of OpenMP wait for each other."""
    return bool(os.environ.get("OMP_WAIT_POLICY") or os.environ.get("GOMP_SPINCOUNT"))


def busy_seconds() -> float | None:
    """Of the cores that this process may run on, together, whoever kept them busy. None where the
    system does not tell."""
    if sys.platform != "linux":
        return None
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    found = [line.split()[1:] for line in lines if line.split(" ", 1)[0] in mine]
    if len(found) < len(mine):
        return None
    # user, nice, system; idle, iowait; irq, softirq. What a hypervisor took is nobody's here.
    ticks = sum(int(core[field]) for core in found for field in (0, 1, 2, 5, 6))
    return ticks / os.sysconf("SC_CLK_TCK")


def own_command() -> str:
    """What this process was started by, as a person typed it."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *sys.argv[1:]])
