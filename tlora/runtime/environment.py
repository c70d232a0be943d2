"""The one place that reads environment variables and quietens the libraries underneath."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """Where tokenised data is kept: TLORA_CACHE, or tlora in the user's cache directory."""
    if chosen := os.environ.get("TLORA_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tlora"


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
