"""Where what was compiled, tried and chosen for this machine is kept."""

import os
from pathlib import Path


def base() -> Path:
    """TLORA_CACHE, or tlora in the user's cache directory. Raises RuntimeError for a user who has
    no home."""
    parent = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("TLORA_CACHE") or f"{parent}/tlora").expanduser()


def directory() -> Path:
    """Of kernels. Tokenised data lies beside it."""
    return base() / "kernels"
